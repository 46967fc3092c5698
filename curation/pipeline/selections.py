"""Stages that need all rows: DuckDB decides by small keys of the rows, with bounded memory and a file to spill to.

    rows --worker processes--> keys --DuckDB--> numbers of the rows that stay, in order (kept.parquet)

The rows themselves are read once more by the next stages, which take those that stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rensa import RMinHash

from curation.errors import PipelineError, one_line
from curation.pipeline.config import BalanceStage, CapStage, DistinctStage, Near, SampleStage, Stage
from curation.pipeline.rows import Step, draw, key_text, session
from curation.pipeline.schemas import require_columns

KEPT = "kept.parquet"
SCHEMA = pa.schema([("n", pa.int64())])
_HASHES = 128
_FOUND = 0.99
"""Probability that two texts at the threshold meet in a band."""
_MULTIPLIERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, 33, dtype=np.uint64)
"""Odd factors by which the hashes of a band become one."""
_AT_ONCE = 65_536
_ROWS_PER_MB = 2048
"""Rows whose hash table takes a MiB of DuckDB's memory, at most a quarter of it in all."""
REASONS = {"distinct": "duplicate", "cap": "over the cap", "sample": "not drawn", "balance": "surplus"}
"""Reason for leaving a row out, by kind of stage."""


def check_selection(stage: Stage, before: pa.Schema, key: str, place: str) -> None:
    """Raise PipelineError for a missing column, or a column of another type."""
    if isinstance(stage, DistinctStage):
        require_columns(before, stage.by or (stage.near.column,) if stage.near else stage.by, f"{place}")
        if stage.near and not pa.types.is_string(before.field(stage.near.column).type):
            raise PipelineError(
                f"{place}.near.column = {stage.near.column!r}: it is no VARCHAR: cast it in a sql stage"
            )
    elif isinstance(stage, CapStage):
        require_columns(before, (*stage.by, *([key] if stage.order == "random" else [])), f"{place}.by")
    elif isinstance(stage, SampleStage):
        require_columns(before, stage.by or (key,), f"{place}.by")
    elif isinstance(stage, BalanceStage):
        require_columns(before, (stage.column, key), f"{place}.column")


def keys_of(step: Step, table: pa.Table) -> pa.Table:
    """Keys of a batch's rows, in their order."""
    stage = step.stage
    if isinstance(stage, DistinctStage) and stage.near is not None:
        return _signatures(stage.near, table)
    return session().columns(table, _expressions(step))


def _expressions(step: Step) -> dict[str, str]:
    stage, key = step.stage, step.key
    if isinstance(stage, DistinctStage | CapStage):
        text = key_text(stage.by)
        group = {"a": f"md5_number_lower({text})", "b": f"md5_number_upper({text})"}
        return group | (
            {"h": draw((key,), stage.seed, step.drawn)}
            if isinstance(stage, CapStage) and stage.order == "random"
            else {}
        )
    if isinstance(stage, SampleStage):
        return {"h": draw(stage.by or (key,), stage.seed, step.drawn)}
    assert isinstance(stage, BalanceStage), "every other stage works on single rows"
    return {"g": f'CAST("{stage.column}" AS VARCHAR)', "h": draw((key,), stage.seed, step.drawn)}


def _signatures(near: Near, table: pa.Table) -> pa.Table:
    found = []
    for text in table.column(near.column).to_pylist():
        words = (text or "").split()
        hashes = RMinHash(num_perm=_HASHES, seed=0)
        hashes.update(
            [" ".join(words[place : place + near.ngram]) for place in range(max(1, len(words) - near.ngram + 1))]
        )
        found.append(hashes.digest())
    signatures = np.array(found, np.uint64).reshape(-1, _HASHES // _band(near), _band(near))
    bands = (signatures * _MULTIPLIERS[: _band(near)]).sum(axis=2, dtype=np.uint64)
    columns = {f"band{number}": bands[:, number] for number in range(bands.shape[1])}
    return pa.table({"s": pa.array(found, pa.list_(pa.uint32())), **columns})


def _band(near: Near) -> int:
    """Hashes of a band: the most with which two texts at the threshold share a band with probability _FOUND."""
    return next(size for size in (32, 16, 8, 4, 2, 1) if 1 - (1 - near.threshold**size) ** (_HASHES // size) >= _FOUND)


class Selection:
    """The keys of all rows, in a database of its own in `folder`."""

    def __init__(self, step: Step, folder: Path, memory_mb: int) -> None:
        self._step, self._memory_mb, self.rows = step, memory_mb, 0
        spill: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{memory_mb}MiB",
            "temp_directory": str(folder / "spill"),
            "threads": 1,
        }
        self._connection = duckdb.connect(
            str(folder / "keys.duckdb"), config={**spill, "preserve_insertion_order": False}
        )

    def add(self, keys: pa.Table) -> None:
        """Add the keys of the next rows. Raises PipelineError if they need more memory."""
        numbers = pa.array(np.arange(self.rows, self.rows + keys.num_rows))
        made = "INSERT INTO keys" if self.rows else "CREATE OR REPLACE TABLE keys AS"
        with self._enough_memory():
            self._connection.register("batch", keys.append_column("n", numbers))
            self._connection.execute(f"{made} SELECT * FROM batch")
            self._connection.unregister("batch")
        self.rows += keys.num_rows

    def write(self, path: Path) -> int:
        """Write the numbers of the rows that stay, in order. Returns how many there are. Raises PipelineError."""
        count = 0
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as out, self._enough_memory():
            if not self.rows:
                return 0
            self._connection.execute("CREATE OR REPLACE TABLE kept(n BIGINT)")
            for query in self._queries():
                self._connection.execute(f"INSERT INTO kept {query}")
            for batch in self._connection.sql("FROM kept ORDER BY n").to_arrow_reader(_AT_ONCE):
                out.write_batch(batch.cast(SCHEMA))
                count += batch.num_rows
        return count

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        """Raise PipelineError if DuckDB fails: it does not take all of its work to the disk."""
        try:
            yield
        except duckdb.Error as error:
            raise PipelineError(
                f"{self._step.place}: DuckDB can't select from {self.rows:,} rows in {self._memory_mb} MiB"
                f" ({one_line(error)}): raise memory_mb, or free the disk if it is full"
            ) from None

    def _queries(self) -> Iterator[str]:
        """Queries whose results together are the numbers of the rows that stay."""
        stage = self._step.stage
        if isinstance(stage, DistinctStage) and stage.near is not None:
            yield self._dissimilar(stage.near)
        elif isinstance(stage, DistinctStage | CapStage):
            # groups of hash tables do not go to the disk: so many of them at once that they fit
            count = math.ceil(self.rows / (self._memory_mb * _ROWS_PER_MB))
            order = "h, n" if isinstance(stage, CapStage) and stage.order == "random" else "n"
            for part in range(count):
                some = f"FROM keys WHERE a % {count} = {part}"
                if isinstance(stage, DistinctStage):
                    yield f"SELECT min(n) {some} GROUP BY a, b"
                else:
                    ranked = f"SELECT n, row_number() OVER (PARTITION BY a, b ORDER BY {order}) AS place {some}"
                    yield f"SELECT n FROM ({ranked}) WHERE place <= {stage.rows}"
        elif isinstance(stage, SampleStage):
            yield f"SELECT n FROM (SELECT n, h FROM keys ORDER BY h, n LIMIT {stage.rows})"
        else:
            assert isinstance(stage, BalanceStage), "every other stage works on single rows"
            for value, quota in self._quotas(stage).items():
                text = value.replace("'", "''")
                yield f"SELECT n FROM (SELECT n, h FROM keys WHERE g = '{text}' ORDER BY h, n LIMIT {quota})"

    def _quotas(self, stage: BalanceStage) -> dict[str, int]:
        """Rows of each group: as many as the scarcest group allows."""
        counts = dict(self._connection.execute("SELECT g, count(*) FROM keys GROUP BY g").fetchall())
        absent = next((value for value in stage.shares if value not in counts), None)
        if absent is not None:
            raise PipelineError(
                f"{self._step.place}.shares: no row has {stage.column} = {absent!r}, so no rows have these shares:"
                " remove it from shares, or correct the stages before"
            )
        shares = {value: Fraction(str(share)) for value, share in stage.shares.items()}
        total = min(counts[value] / share for value, share in shares.items())
        return {value: int(total * share) for value, share in shares.items()}

    def _dissimilar(self, near: Near) -> str:
        """Rows without a similar earlier row, of those that are first in a bucket of one of the bands."""
        self._connection.execute("CREATE OR REPLACE TABLE pairs(n BIGINT, earlier BIGINT)")
        for number in range(_HASHES // _band(near)):
            self._connection.execute(
                "INSERT INTO pairs SELECT n, earlier FROM (SELECT n, min(n) OVER (PARTITION BY"
                f" band{number}) AS earlier FROM keys) WHERE n > earlier"
            )
        equal = "list_sum(list_transform(list_zip(x.s, y.s), lambda pair: (pair[1] = pair[2])::INT))"
        return (
            "SELECT n FROM keys WHERE n NOT IN (SELECT x.n FROM (SELECT DISTINCT * FROM pairs) AS p JOIN keys AS x ON"
            f" x.n = p.n JOIN keys AS y ON y.n = p.earlier WHERE {equal} >= {near.threshold} * {_HASHES})"
        )


class Kept:
    """Numbers of the rows that stay, read in order."""

    def __init__(self, path: Path) -> None:
        self._batches: Iterator[pa.RecordBatch] = pq.ParquetFile(path, pre_buffer=False).iter_batches(_AT_ONCE)
        self._left = np.empty(0, np.int64)

    def between(self, begin: int, end: int) -> np.ndarray:
        """Those from `begin` up to `end`, relative to `begin`, int64; a later call asks for later ones."""
        while not len(self._left) or self._left[-1] < end:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._left = np.concatenate((self._left[self._left >= begin], batch.column(0).to_numpy()))
        first, last = np.searchsorted(self._left, (begin, end))
        found, self._left = self._left[first:last] - begin, self._left[last:]
        return found
