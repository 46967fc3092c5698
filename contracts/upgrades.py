"""Columns and facts that older stores lack, with defaults for artifacts from before their introduction.

`contracts.artifacts.Artifact.table` reads all tables and `Artifact.meta` all facts of manifests, so only this module
handles older forms. Columns are only added; a column with another meaning gets another name. The oldest readable stores
are those of commit c813e3a (2026-11-21).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from contracts.episodes import ROUTED_EXPERTS, SUPPORTS

_FAILURE = {"failure": pa.string()}

COLUMNS: Mapping[tuple[str, str], Mapping[str, pa.DataType]] = {
    ("group", "episodes.parquet"): _FAILURE,
    ("rollouts", "episodes.parquet"): _FAILURE,
    ("evaluation_run", "episodes.parquet"): _FAILURE,
    ("dataset", "train.parquet"): {"sample": pa.int32(), "sequence": pa.int32()},
    ("dataset", "members.parquet"): {"sample": pa.int32()},
}
"""(kind of artifact, file) -> columns added later, with their types. They read as null in older artifacts."""

_RECORDED = {each.name: each.type for each in (ROUTED_EXPERTS, SUPPORTS)}

OPTIONAL: Mapping[tuple[str, str], Mapping[str, pa.DataType]] = {
    ("group", "sequences.parquet"): _RECORDED,
    ("rollouts", "sequences.parquet"): _RECORDED,
    ("dataset", "train.parquet"): _RECORDED,
}
"""(kind of artifact, file) -> columns that only some experiments write. They read as null where absent, if named."""

META: Mapping[str, Mapping[str, Any]] = {
    "group": {"stragglers": 0},
    "rollouts": {"stragglers": 0},
    "rewards": {"stragglers": 0},
}
"""Kind of artifact -> facts added to its manifest later, with their defaults."""


def absent_columns(kind: str, file: str, present: Iterable[str], named: Iterable[str] = ()) -> dict[str, pa.DataType]:
    """Columns added later, and optional ones among `named`, that a table lacks, with their types. present: its
    columns.
    """
    optional = OPTIONAL.get((kind, file), {})
    known = {**COLUMNS.get((kind, file), {}), **{name: optional[name] for name in named if name in optional}}
    return {name: type_ for name, type_ in known.items() if name not in set(present)}


def with_absent(table: pa.Table, absent: Mapping[str, pa.DataType]) -> pa.Table:
    """The table with these columns appended, null in every row."""
    for name, type_ in absent.items():
        table = table.append_column(name, pa.nulls(table.num_rows, type_))
    return table


def meta_of(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a manifest, with defaults for later ones."""
    return {**META.get(kind, {}), **meta}
