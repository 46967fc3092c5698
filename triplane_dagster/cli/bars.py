"""Progress display: bars on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import inf
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from resources.progress import Progress as Update

LINE_EVERY_S = 15.0
"""Seconds between two lines about one phase without a terminal."""
SHOWN = ("tokens_per_second", "rows_per_second", "loss", "reward_mean", "expected_solve", "groups")
"""Measurements shown beside a bar."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise; rich would end the process, and send what it prints later nowhere."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads the progress")


class Bars:
    """Progress sink with one bar for each phase of a step. Enter it before the work begins. Once nobody can see it any
    more, it shows nothing: the work goes on.

    side_by_side: two iterations report at once, from two threads.
    """

    def __init__(self, *, side_by_side: bool = False) -> None:
        self._side_by_side, self._lock = side_by_side, threading.Lock()
        # a copy of stderr: Dagster points descriptor 2 at a log file while a step runs
        self._stream = os.fdopen(os.dup(2), "w")
        self._console = _Console(file=self._stream, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[numbers]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._unseen = False
        """Whether the terminal is gone, or nobody reads."""
        self._tasks: dict[tuple[str | None, str, str], TaskID] = {}
        self._said: dict[tuple[str | None, str, str], float] = {}
        """Earliest time of a phase's next line; infinity after the phase has finished."""

    def __enter__(self) -> Self:
        with self._watched():
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._watched():
            self._bars.stop()
        with suppress(OSError):
            self._stream.close()

    def __call__(self, update: Update) -> None:
        """Show one update."""
        with self._lock, self._watched():
            if self._unseen:
                return
            if self._console.is_terminal:
                self._draw(update)
            else:
                self._say(update)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._unseen = True

    def _draw(self, update: Update) -> None:
        place = (update.partition, update.asset, update.phase)
        count = count_text(update.done, update.total)
        shown = {
            "completed": update.done,
            "total": update.total,
            "count": count,
            "numbers": escape(numbers_text(update.numbers)),
        }
        if place in self._tasks:
            self._bars.update(self._tasks[place], **shown)  # type: ignore[arg-type]
            return
        self._finish_others(place)
        self._tasks[place] = self._bars.add_task(escape(_name(update)), **shown)  # type: ignore[arg-type]

    def _finish_others(self, place: tuple[str | None, str, str]) -> None:
        """Stop the bars of earlier steps and remove those of earlier iterations, which the final table shows."""
        for (partition, asset, phase), task in list(self._tasks.items()):
            if partition != place[0] and self._side_by_side and _are_neighbours(partition, place[0]):
                continue
            if partition != place[0]:
                self._bars.remove_task(task)
                del self._tasks[(partition, asset, phase)]
            elif asset != place[1]:
                self._bars.stop_task(task)

    def _say(self, update: Update) -> None:
        place, now = (update.partition, update.asset, update.phase), time.monotonic()
        finished = update.total is not None and update.done >= update.total
        due = self._said.get(place, 0.0)
        if now < due and not (finished and due < inf):
            return
        self._said[place] = inf if finished else now + LINE_EVERY_S
        parts = [_name(update), count_text(update.done, update.total), numbers_text(update.numbers)]
        self._console.print("  ".join(part for part in parts if part), soft_wrap=True, markup=False)


def count_text(done: float, total: float | None) -> str:
    """Progress as text, e.g. 128/512."""
    return f"{done:g}" if total is None else f"{done:g}/{total:g}"


def numbers_text(numbers: Mapping[str, float]) -> str:
    """Selected measurements as text, in a fixed order."""
    return "  ".join(f"{name.replace('_', ' ')} {numbers[name]:.4g}" for name in SHOWN if name in numbers)


def _are_neighbours(one: str | None, other: str | None) -> bool:
    return bool(one and other and one.isdigit() and other.isdigit() and abs(int(one) - int(other)) == 1)


def _name(update: Update) -> str:
    return " ".join(part for part in (update.partition, update.asset, update.phase) if part)
