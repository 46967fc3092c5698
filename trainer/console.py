"""Show progress on stderr: a bar on a terminal, plain lines elsewhere. stdout has only the result."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainer.config import RlJob, SftJob
from trainer.metrics import Record, Watcher


@contextmanager
def console_watcher(job: SftJob | RlJob, every: int = 25) -> Iterator[Watcher]:
    """Watcher that shows a run's progress. every: number of training records between two plain lines."""
    if not sys.stderr.isatty():
        yield _lines(every if isinstance(job, SftJob) else 1)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        steps = job.config.optimizer_steps if isinstance(job, RlJob) else job.config.max_steps
        bar = progress.add_task(f"training ({job.kind})", total=steps, note="")

        def watch(record: Record) -> None:
            if "loss" in record:
                note = f"step {record['step']} loss {record['loss']:.4f}"
                if isinstance(job, SftJob):
                    progress.update(bar, completed=record["step"], note=note)
                else:
                    progress.update(bar, advance=1, note=note)
            elif "expected_solve" in record:
                progress.console.print(_describe(record))

        yield watch


def _lines(every: int) -> Watcher:
    def watch(record: Record) -> None:
        if "loss" not in record or record["step"] % every == 0:
            print(_describe(record), file=sys.stderr, flush=True)

    return watch


def _describe(record: Record) -> str:
    shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in record.items())
    return ", ".join(shown)
