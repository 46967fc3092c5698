"""Worker processes, which run stages of rows and compute keys of selections. They end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pyarrow as pa

from contracts.errors import InfraFault
from contracts.parents import end_with_parent
from curation.pipeline.rows import Step, Tally, Work, carefully, run_steps, work_of
from curation.pipeline.selections import keys_of

_steps: list[tuple[Step, Work | None]] = []
"""Stages of this worker's pipeline."""


class Workers:
    """Processes that start with the first batch. They are forked from one that has imported their modules."""

    def __init__(self, steps: Sequence[Step], folder: Path, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pool = ProcessPoolExecutor(
            count, context, _begin, (list(steps), str(folder), [str(folder), *sys.path], dict(os.environ))
        )

    def run(self, steps: Sequence[Step], table: pa.Table) -> Future[tuple[bytes, Tally]]:
        """Run consecutive stages of rows."""
        return self._pool.submit(_run, [step.number for step in steps], packed(table))

    def keys(self, step: Step, table: pa.Table) -> Future[tuple[bytes, Tally]]:
        """Keys of rows for a selection."""
        return self._pool.submit(_keys, step.number, packed(table))

    def stop(self) -> None:
        """End the processes, also those at work."""
        running = list((self._pool._processes or {}).values())  # the pool itself waits for the work under way
        for each in running:
            each.kill()
        self._pool.shutdown(cancel_futures=True)


def unpacked(done: tuple[bytes, Tally]) -> tuple[pa.Table, Tally]:
    """Result of a worker."""
    with pa.ipc.open_stream(done[0]) as stream:
        return stream.read_all(), done[1]


def packed(table: pa.Table) -> bytes:
    """Rows as bytes, without those that a slice leaves out."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def broken(error: BrokenProcessPool) -> InfraFault:
    """Error for a pool that lost a process."""
    return InfraFault(
        f"a worker process died ({error}): free memory or lower batch_rows or workers, then run the same command again"
    )


def _begin(steps: list[Step], folder: str, path: list[str], environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the parent ends this one
    sys.path[:] = list(dict.fromkeys(path))
    os.environ.clear()
    os.environ.update(environment)  # the process that this one was forked from has that of the first run
    end_with_parent()
    pa.set_cpu_count(1)
    for step in steps:
        needs = step.stage.kind in ("sql", "where", "map", "sample")
        _steps.append((step, work_of(step, Path(folder)) if needs and not step.stage.selects else None))


def _run(numbers: list[int], data: bytes) -> tuple[bytes, Tally]:
    chosen = [(step, work) for step, work in (_steps[number] for number in numbers) if work is not None]
    table, tally = run_steps(chosen, unpacked((data, Tally()))[0])
    return packed(table), tally


def _keys(number: int, data: bytes) -> tuple[bytes, Tally]:
    step, table = _steps[number][0], unpacked((data, Tally()))[0]
    return packed(carefully(step, lambda rows: (keys_of(step, rows), {}), table)[0]), Tally()
