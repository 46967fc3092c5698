"""Parquet files of episodes from anywhere, as the artifacts that training jobs read. docs/training.md has the schema.

A file is read batch by batch, checked, and written into the store once; the same file is found again by its digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key, file_sha256
from contracts.episodes import SUPPORTS, TokenRole
from contracts.store import Store
from trainer.errors import TrainingDataError

VERSION = "1"
_TOKENS, _ROLES, _LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.list_(pa.float32())
_ROWS = 256
_HELD_OUT = 64


def import_demonstrations(
    path: Path, store: Store, validation: Path | None = None, *, hold_out: bool = False
) -> Artifact:
    """`demonstrations` artifact of a file. validation: file for validation. hold_out: use up to 64 of the first rows, a
    tenth at most, for validation instead.

    Raises TrainingDataError, which names file, row or column.
    """
    content = {"train": _digest(path), "validation": _digest(validation) if validation else str(hold_out)}
    key = action_key("import_demonstrations", content, {}, VERSION)
    found = find_artifact(store, "demonstrations", key)
    if found is not None:
        return found
    schema = pa.schema([("token_ids", _TOKENS), ("token_role", _ROLES), ("clean", pa.bool_())])
    rows = _row_count(path)
    held = 0 if validation or not hold_out else min(_HELD_OUT, max(1, rows // 10))
    with ArtifactWriter(store, "demonstrations", key, parents={}, config=content, code_version=VERSION) as out:
        with (
            pq.ParquetWriter(out.directory / "train.parquet", schema, compression="zstd") as train,
            pq.ParquetWriter(out.directory / "validation.parquet", schema, compression="zstd") as kept,
        ):
            for first, batch in _batches(path, ("token_ids",)):
                table = _table(_tokens_of(batch, path, first), schema)
                split = min(max(0, held - first), table.num_rows)
                kept.write_table(table.slice(0, split))
                train.write_table(table if rows == 1 else table.slice(split))
            for first, batch in _batches(validation, ("token_ids",)) if validation else ():
                kept.write_table(_table(_tokens_of(batch, validation or path, first), schema))
        for name in ("train.parquet", "validation.parquet"):
            out.add_file(name)
        return out.commit(meta={"file": path.name})


def import_episodes(path: Path, store: Store) -> Artifact:
    """`dataset` artifact of a file of graded episodes.

    Raises TrainingDataError, which names file, row or column.
    """
    content = {"episodes": _digest(path)}
    key = action_key("import_episodes", content, {}, VERSION)
    found = find_artifact(store, "dataset", key)
    if found is not None:
        return found
    names = [("episode_id", pa.string()), ("group_id", pa.string())]
    schema = pa.schema([*names, ("token_ids", _TOKENS), ("token_role", _ROLES), ("logprobs", _LOGPROBS)])
    if SUPPORTS.name in _column_names(path):
        schema = schema.append(SUPPORTS)
    members: list[pa.Table] = []
    with ArtifactWriter(store, "dataset", key, parents={}, config=content, code_version=VERSION) as out:
        with pq.ParquetWriter(out.directory / "train.parquet", schema, compression="zstd") as train:
            for first, batch in _batches(path, ("token_ids", "logprobs", "group_id", "reward")):
                columns = _tokens_of(batch, path, first)
                columns["logprobs"] = _cast(batch, "logprobs", _LOGPROBS, path)
                columns["group_id"] = _cast(batch, "group_id", pa.string(), path)
                columns["reward"] = _rewards(batch, path, first)
                columns["episode_id"] = _episode_ids(batch, path, first)
                if SUPPORTS.name in schema.names:
                    columns[SUPPORTS.name] = _cast(batch, SUPPORTS.name, SUPPORTS.type, path)
                graded = pc.is_valid(columns["reward"])
                table = pa.table(columns).filter(graded)
                train.write_table(table.select(schema.names).cast(schema))
                members.append(table.select(["episode_id", "group_id", "reward"]))
        out.add_file("train.parquet")
        out.add_table("members.parquet", _with_means(pa.concat_tables(members) if members else None, path))
        return out.commit(meta={"file": path.name})


def _digest(path: Path) -> str:
    if not path.is_file():
        raise TrainingDataError(f"{path} does not exist: name a Parquet file of episodes")
    return file_sha256(path)


def _row_count(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _column_names(path: Path) -> list[str]:
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _batches(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Number of the first row, and the batch, with the columns of the schema that the file has."""
    known = ("episode_id", "group_id", "reward", "token_ids", "token_role", "spans", "logprobs", SUPPORTS.name)
    try:
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            present = [name for name in known if name in file.schema_arrow.names]
            for name in (*needed, *(() if "spans" in present else ("token_role",))):
                if name not in present:
                    either = " (or spans)" if name == "token_role" else ""
                    raise TrainingDataError(f"{path} has no column {name}{either}: see docs/training.md for the schema")
            first = 0
            for batch in file.iter_batches(_ROWS, columns=present):
                yield first, batch
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> TrainingDataError:
    return TrainingDataError(f"{path} is not a readable Parquet file ({' '.join(str(error).split())[:200]})")


def _cast(batch: pa.RecordBatch, name: str, wanted: pa.DataType, path: Path) -> pa.Array:
    try:
        return batch.column(name).cast(wanted)
    except pa.ArrowException as error:
        raise TrainingDataError(
            f"{path}: column {name} of type {batch.column(name).type} can't be read as {wanted} ({error})"
        ) from None


def _table(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    clean = pa.array(np.ones(len(columns["token_ids"]), np.bool_))
    return pa.table({**columns, "clean": clean}).cast(schema)


def _tokens_of(batch: pa.RecordBatch, path: Path, first: int) -> dict[str, pa.Array]:
    """Columns token_ids and token_role; roles from the spans if there are any. first: number of the first row."""
    tokens = _cast(batch, "token_ids", _TOKENS, path)
    if "token_role" in batch.schema.names:
        return {"token_ids": tokens, "token_role": _cast(batch, "token_role", _ROLES, path)}
    lengths = pc.fill_null(pc.list_value_length(tokens), 0).to_pylist()
    spans = batch.column("spans").to_pylist()
    pairs = enumerate(zip(lengths, spans, strict=True))
    roles = [_roles(length, own, f"{path} row {first + row}") for row, (length, own) in pairs]
    return {"token_ids": tokens, "token_role": pa.array(roles, _ROLES)}


def _roles(length: int, spans: object, where: str) -> np.ndarray:
    """uint8 [length]: role of each token; those outside of all spans belong to the prompt. Raises TrainingDataError."""
    roles = np.full(length, int(TokenRole.PROMPT), np.uint8)
    spans = [] if spans is None else spans
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise TrainingDataError(f"{where} has the spans {spans!r:.60}: list structs of role, start and end")
    for span in spans:
        role, start, end = str(span.get("role")), span.get("start"), span.get("end")
        if role.upper() not in TokenRole.__members__:
            names = ", ".join(each.name.lower() for each in TokenRole)
            raise TrainingDataError(f"{where} has a span with role {role}: use one of {names}")
        if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end <= length:
            raise TrainingDataError(f"{where} has a span from {start} to {end}, its tokens are 0 to {length}")
        roles[start:end] = int(TokenRole[role.upper()])
    return roles


def _rewards(batch: pa.RecordBatch, path: Path, first: int) -> pa.Array:
    """Column reward; null: not graded. first: number of the first row. Raises TrainingDataError for NaN or infinity."""
    rewards = _cast(batch, "reward", pa.float64(), path)
    row = pc.index(pc.is_finite(rewards), False).as_py()
    if row >= 0:
        raise TrainingDataError(
            f"{path} row {first + row} has the reward {rewards[row]}: write a finite number, or null if not graded"
        )
    return rewards


def _episode_ids(batch: pa.RecordBatch, path: Path, first: int) -> pa.Array:
    if "episode_id" in batch.schema.names:
        return _cast(batch, "episode_id", pa.string(), path)
    return pa.array([f"row-{first + row:09}" for row in range(batch.num_rows)])


def _with_means(members: pa.Table | None, path: Path) -> pa.Table:
    """Members with the mean reward of their group. Raises TrainingDataError for an episode with two rows."""
    if members is None:
        raise TrainingDataError(f"{path} has no rows: write some episodes")
    lost = [name for name in ("episode_id", "group_id") if members.column(name).null_count]
    if lost:
        raise TrainingDataError(f"{path}: column {lost[0]} is null in a graded row: give each one a value")
    twice = members.num_rows - pc.count_distinct(members.column("episode_id")).as_py()
    if twice:
        counts = members.column("episode_id").value_counts().to_pylist()
        name = next(each["values"] for each in counts if each["counts"] > 1)
        raise TrainingDataError(f"{path}: episode_id {name} is in several rows: give each row one of its own")
    groups = members.column("group_id").combine_chunks()
    numbers = np.asarray(pc.index_in(groups, value_set=pc.unique(groups)).to_numpy(), np.int64)
    rewards = np.asarray(members.column("reward").to_numpy(), np.float64)
    means = np.bincount(numbers, rewards) / np.maximum(np.bincount(numbers), 1)
    return members.append_column("group_reward_mean", pa.array(means[numbers]))
