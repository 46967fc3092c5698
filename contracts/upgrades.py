"""What older stores lack: columns and facts that later versions write, with the value that stands for "made before this
was written".

Every table is read through `contracts.artifacts.Artifact.table` and every manifest's facts through `Artifact.meta`, so
this is the one place that knows of older forms. A column is only ever added; a change of meaning is another column.
The oldest stores read are those of commit c813e3a (2026-11-21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

_FAILURE = {"failure": pa.string()}

COLUMNS: Mapping[tuple[str, str], Mapping[str, pa.DataType]] = {
    ("group", "episodes.parquet"): _FAILURE,
    ("rollouts", "episodes.parquet"): _FAILURE,
    ("evaluation_run", "episodes.parquet"): _FAILURE,
    ("dataset", "train.parquet"): {"sample": pa.int32(), "sequence": pa.int32()},
    ("dataset", "members.parquet"): {"sample": pa.int32()},
}
"""(kind of artifact, file) -> columns that came later and their types. An artifact without one reads as null there."""

META: Mapping[str, Mapping[str, Any]] = {
    "group": {"stragglers": 0},
    "rollouts": {"stragglers": 0},
    "rewards": {"stragglers": 0},
}
"""Kind of artifact -> facts of its manifest that came later, and what they were before."""


def absent_columns(kind: str, file: str, present: list[str]) -> dict[str, pa.DataType]:
    """The later columns of a table that it does not have, and their types. present: those that it has."""
    return {name: type_ for name, type_ in COLUMNS.get((kind, file), {}).items() if name not in present}


def with_absent(table: pa.Table, absent: Mapping[str, pa.DataType]) -> pa.Table:
    """The table with these columns appended, null in every row."""
    for name, type_ in absent.items():
        table = table.append_column(name, pa.nulls(table.num_rows, type_))
    return table


def meta_of(kind: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's facts, those that came later filled in."""
    return {**META.get(kind, {}), **meta}
