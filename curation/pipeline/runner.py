"""Run a pipeline: segment by segment, each from its last committed batch.

    reader --batch--> [stages: worker processes | connections] --> part in the store --> ... --> files of the artifact
              `--- at most `in_flight` batches at once ---'          (kept by a kill)     (in the order of the batches)

A batch that waits for an endpoint leaves the processes to others, so both kinds of work overlap.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import digest_of, table_digest
from contracts.errors import StoreError, first_error
from contracts.failpoints import failpoint
from contracts.parts import Parts
from contracts.store import Store
from curation.errors import PipelineError
from curation.pipeline.config import DATA_VERSION, AskStage, JoinStage, Sink
from curation.pipeline.plan import DATA, KEPT_ROWS, Plan, Segment
from curation.pipeline.requests import AskWork, JoinWork, RequestWork
from curation.pipeline.rows import Step, Tally, counted
from curation.pipeline.selections import KEPT, REASONS, Kept, Selection
from curation.pipeline.sources import Batch, ParquetReader, Reader
from curation.pipeline.workers import Workers, broken, unpacked

AHEAD = 3
"""Batches in flight beyond two of each worker, so that requests of some overlap with the work on others."""
_COUNTS = pa.schema([("stage", pa.int32()), ("what", pa.string()), ("rows", pa.int64())])
_CURSOR = pa.schema([("cursor", pa.string())])
_SOURCE = -1
Report = Callable[[str, int, int | None, float], None]
"""Receives (what runs, rows read, all rows if known, rows per second)."""


def run_pipeline(plan: Plan, store: Store, report: Report = lambda phase, done, total, rate: None) -> Artifact:
    """The result of a pipeline, made unless it exists. A killed run goes on. Raises PipelineError, InfraFault."""
    found = find_artifact(store, DATA, plan.key)
    if found is not None:
        return found
    steps = [step for segment in plan.segments for step in segment.steps]
    if "?" in str(store.scratch) and any(segment.kind == KEPT_ROWS for segment in plan.segments):
        # selections keep keys in a DuckDB file, and DuckDB writes the log of such a path to another place
        raise PipelineError(f"{store.scratch} has a ? in its path: use a store, or $TRIPLANE_CACHE, in another folder")
    workers = Workers(steps, plan.folder, plan.workers)
    try:
        made = list[Artifact | None]()
        for each in plan.segments:
            made.append(find_artifact(store, each.kind, _key(each, made)))
        for number, segment in enumerate(plan.segments):
            if made[number] is None and _is_needed(made, plan.segments, number):
                made[number] = _Run(plan, store, workers, report, segment, made[:number]).make()
    except BrokenProcessPool as error:
        raise broken(error) from None
    finally:
        workers.stop()
    result = made[-1]
    assert result is not None, "the last segment is always needed"
    return result


def _key(segment: Segment, before: Sequence[Artifact | None]) -> str:
    """Action key of a segment's artifact: numbers of rows belong to these rows, since others may be made with the key
    of removed ones, e.g. after an endpoint refused some.
    """
    rows = before[-1] if segment.kind == KEPT_ROWS else None
    return digest_of([segment.key, rows.ref.digest]) if rows is not None else segment.key


def _is_needed(made: Sequence[Artifact | None], segments: Sequence[Segment], number: int) -> bool:
    """Whether a later segment, still to be made, reads the artifact of this one."""
    if number == len(segments) - 1:
        return True
    reads = (number + 1, number + 2) if segments[number].kind != KEPT_ROWS else (number + 1,)
    return any(made[each] is None and _is_needed(made, segments, each) for each in reads if each < len(segments))


class _KeptReader:
    """Rows of an artifact that a selection keeps."""

    def __init__(self, rows: Artifact, kept: Artifact, batch_rows: int) -> None:
        self._reader, self._kept = rows_reader(rows, batch_rows), kept.path(KEPT)
        self.schema, self.rows = self._reader.schema, self._reader.rows

    def batches(self, cursor: Any) -> Iterator[Batch]:
        inner, begin = cursor or (None, 0)
        kept = Kept(self._kept)
        for batch in self._reader.batches(inner):
            end = begin + batch.table.num_rows
            yield Batch(batch.table.take(kept.between(begin, end)), [batch.cursor, end])
            begin = end


def rows_reader(artifact: Artifact, batch_rows: int) -> ParquetReader:
    """Reader of the rows of an artifact."""
    return ParquetReader([artifact.path(name) for name in artifact.names() if name != KEPT], (), batch_rows)


@dataclass
class _Run:
    """One segment in the making."""

    plan: Plan
    store: Store
    workers: Workers
    report: Report
    segment: Segment
    before: Sequence[Artifact | None]
    """Artifacts of the segments before."""

    def make(self) -> Artifact:
        """The segment's artifact."""
        if self.segment.kind == KEPT_ROWS:
            return self._select()
        reader = self._reader()
        asyncio.run(self._stream(reader))
        return self._join()

    def _reader(self) -> Reader:
        if not self.before:
            return self.plan.reader
        rows, kept = self.before[-2:]
        assert rows is not None and kept is not None, "needed artifacts are made in order"
        return _KeptReader(rows, kept, self.plan.pipeline.batch_rows)

    def _name(self, number: int) -> str:
        """Name of the part of a batch."""
        return f"{self._prefix}{number:08d}"

    @property
    def _prefix(self) -> str:
        """Prefix of the names of parts that were made from the same rows."""
        kept = self.before[-1] if self.before else None
        return f"{kept.ref.key[:16]}-" if kept is not None else ""

    @property
    def _parts(self) -> Parts:
        return Parts(self.store, self.segment.kind, self.segment.key, [self._schema, _COUNTS, _CURSOR])

    @property
    def _schema(self) -> pa.Schema:
        steps = [step for segment in self.plan.segments for step in segment.steps]
        if self.segment.steps:
            return self.segment.steps[-1].after
        last = [step for step in steps if step.number < len(self.segment.config["stages"])]
        return last[-1].after if last else self.plan.reader.schema

    def _writer(self) -> ArtifactWriter:
        own = self.segment
        key = _key(own, self.before)
        return ArtifactWriter(self.store, own.kind, key, parents={}, config=own.config, code_version=DATA_VERSION)

    async def _stream(self, reader: Reader) -> None:
        """Commit a part for each batch. Those in the store are not computed again."""
        parts, requests = self._parts, self._requests()
        done, first, cursor = self._committed(parts)
        watch = _Watch(self.report, self._phase, reader.rows)
        batches = reader.batches(cursor)
        free = asyncio.Semaphore(2 * self.plan.workers + AHEAD)

        async def one(name: str, batch: Batch) -> None:
            try:
                table, tally = await self._through(batch, requests)
                await asyncio.to_thread(self.plan.unchanged.require, self.segment.files)
                failpoint("data-batch-done")
                counts = [{"stage": n, "what": what, "rows": rows} for (n, what), rows in sorted(tally.items())]
                place = pa.table([[json.dumps(batch.cursor)]], schema=_CURSOR)
                await asyncio.to_thread(parts.add, name, [table, pa.Table.from_pylist(counts, _COUNTS), place])
                failpoint("data-batch-committed")
                watch.add(batch.table.num_rows)
            finally:
                free.release()

        try:
            async with asyncio.TaskGroup() as group:
                number = first
                while True:
                    await free.acquire()
                    batch = await asyncio.to_thread(next, batches, None)
                    if batch is None:
                        break
                    name = self._name(number)
                    number += 1
                    if name in done:
                        watch.add(batch.table.num_rows)
                        free.release()
                    else:
                        group.create_task(one(name, batch))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            for each in requests.values():
                await each.close()

    def _committed(self, parts: Parts) -> tuple[set[str], int, Any]:
        """(names of the parts in the store; number of the first missing one; cursor of its batch)."""
        done = set(parts.names())
        first = next(number for number in range(len(done) + 1) if self._name(number) not in done)
        while first:
            last = parts.get(self._name(first - 1))
            if last is not None:
                return done, first, json.loads(last[2].column("cursor")[0].as_py())
            first -= 1
            done.discard(self._name(first))
        return done, 0, None

    async def _through(self, batch: Batch, requests: dict[int, RequestWork]) -> tuple[pa.Table, Tally]:
        table, tally = batch.table, Tally()
        if not self.before:
            tally[_SOURCE, "in"] += table.num_rows + batch.dropped.total()
            tally[_SOURCE, "out"] += table.num_rows
            tally.update({(_SOURCE, reason): count for reason, count in batch.dropped.items()})
        for asks, steps in groupby(self.segment.steps, key=lambda step: step.number in requests):
            if asks:
                for step in steps:
                    table = counted(tally, step, table, await requests[step.number].run(table))
            else:
                table, found = unpacked(await asyncio.wrap_future(self.workers.run(list(steps), table)))
                tally.update(found)
        return table, tally

    def _requests(self) -> dict[int, RequestWork]:
        found: dict[int, RequestWork] = {}
        for step in self.segment.steps:
            if isinstance(step.stage, JoinStage):
                found[step.number] = JoinWork(step, step.stage, self.plan.folder)
            elif isinstance(step.stage, AskStage):
                found[step.number] = AskWork(step, step.stage, self.store)
        return found

    def _join(self) -> Artifact:
        """Write the parts into files, in order."""
        parts, tally, rows = self._parts, Tally(), 0
        with self._writer() as out:
            files = _Files(out, self._schema, self.plan.pipeline.sink if self.segment.kind == DATA else Sink())
            for name in (each for each in parts.names() if each.startswith(self._prefix)):
                found = parts.get(name)
                if found is None:
                    other = find_artifact(self.store, self.segment.kind, _key(self.segment, self.before))
                    if other is not None:  # of another process, which removes the parts
                        return other
                    raise StoreError(
                        f"part {name} of {self._phase} was damaged and is removed: run the same command again"
                    )
                files.add(found[0])
                rows += found[0].num_rows
                tally.update({(row["stage"], row["what"]): row["rows"] for row in found[1].to_pylist()})
            files.close()
            made = out.commit(meta={"rows": rows, **self._facts(tally)})
        parts.discard()
        return made

    def _select(self) -> Artifact:
        """Write the numbers of the rows that a selection keeps."""
        (step,), source = self.segment.steps, self.before[-1]
        assert source is not None, "needed artifacts are made in order"
        found = find_artifact(self.store, KEPT_ROWS, _key(self.segment, self.before))
        if found is not None:
            return found
        reader = rows_reader(source, self.plan.pipeline.batch_rows)
        watch = _Watch(self.report, self._phase, reader.rows)
        with self._writer() as out:
            selection = Selection(step, out.directory, self.plan.pipeline.memory_mb)
            try:
                for keys in self._keys(step, reader):
                    selection.add(keys)
                    watch.add(keys.num_rows)
                kept = selection.write(out.directory / KEPT)
            finally:
                selection.close()
            out.add_file(KEPT)
            tally = Tally({(step.number, "in"): selection.rows, (step.number, "out"): kept})
            tally[step.number, REASONS[step.stage.kind]] = selection.rows - kept
            return out.commit(meta={"rows": kept, **self._facts(tally)})

    def _keys(self, step: Step, reader: Reader) -> Iterator[pa.Table]:
        pending = []
        for batch in reader.batches(None):
            pending.append(self.workers.keys(step, batch.table))
            if len(pending) > self.plan.workers:
                yield unpacked(pending.pop(0).result())[0]
        for each in pending:
            yield unpacked(each.result())[0]

    @property
    def _phase(self) -> str:
        names = [step.stage.called for step in self.segment.steps]
        return ", ".join(names[:4]) + ", ..." * (len(names) > 4) if names else "write"

    def _facts(self, tally: Tally) -> dict[str, Any]:
        """Facts for the manifest: rows in and out of each stage up to here."""
        earlier: list[dict[str, Any]] = next(
            (each.meta["stages"] for each in reversed(self.before) if each is not None), []
        )
        stages = {_SOURCE: {"stage": "source"}} if not self.before else {}
        stages |= {step.number: {"stage": step.stage.called} for step in self.segment.steps}
        own = []
        for number, named in stages.items():
            reasons = {
                what: rows for (n, what), rows in sorted(tally.items()) if n == number and what not in ("in", "out")
            }
            own.append(
                {
                    **named,
                    "in": tally[number, "in"],
                    "out": tally[number, "out"],
                    "left_out": {k: v for k, v in reasons.items() if v},
                }
            )
        return {"pipeline": self.plan.pipeline.name, "inputs": self.segment.inputs, "stages": [*earlier, *own]}


class _Files:
    """Parquet files of an artifact, of bounded size, whose bytes depend on the tables alone."""

    def __init__(self, out: ArtifactWriter, schema: pa.Schema, sink: Sink) -> None:
        self._out, self._schema, self._sink = out, schema, sink
        self._group: list[pa.Table] = []
        self._group_bytes = self._file_bytes = self._number = 0
        self._digests: list[str] = []
        self._file: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Append rows."""
        self._group.append(table)
        self._group_bytes += table.nbytes
        if self._group_bytes >= self._sink.row_group_mb << 20:
            self._end_group()
        if self._file_bytes >= self._sink.file_mb << 20:
            self._end_file()

    def close(self) -> None:
        """Write what is left; without any rows a file without rows."""
        self._end_group()
        if self._file is not None or not self._number:
            self._opened()
            self._end_file()

    def _opened(self) -> pq.ParquetWriter:
        if self._file is None:
            self._file = pq.ParquetWriter(self._out.directory / self._name, self._schema, compression="zstd")
        return self._file

    @property
    def _name(self) -> str:
        return f"rows-{self._number:05d}.parquet"

    def _end_group(self) -> None:
        table = pa.concat_tables(self._group) if self._group else self._schema.empty_table()
        if table.num_rows:
            self._opened().write_table(table, row_group_size=table.num_rows)
            self._digests.append(table_digest(table))
        self._file_bytes += self._group_bytes
        self._group, self._group_bytes = [], 0

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._out.add_file(self._name, digest_of([table_digest(self._schema.empty_table()), *self._digests]))
        self._file, self._digests, self._file_bytes = None, [], 0
        self._number += 1


class _Watch:
    """Rows read so far, and how many of them a second."""

    def __init__(self, report: Report, phase: str, total: int | None) -> None:
        self._report, self._phase, self._total = report, phase, total
        self._rows, self._begin = 0, time.monotonic()

    def add(self, rows: int) -> None:
        """Count rows."""
        self._rows += rows
        seconds = max(1e-3, time.monotonic() - self._begin)
        self._report(self._phase, self._rows, self._total, self._rows / seconds)
