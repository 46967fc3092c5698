"""Metrics of a run: one JSON object per step, stored in the artifact and shown during the run.

Watchers receive records during the run: the terminal (`trainer.console`), and Dagster Pipes if Dagster launched the
process.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]
Watcher = Callable[[Record], None]


class Metrics:
    """An append-only list of records with a clock."""

    def __init__(self, watchers: Iterable[Watcher] = (), earlier: Iterable[Record] = ()) -> None:
        self.records: list[Record] = list(earlier)
        self._watchers = list(watchers)
        self._mark = time.perf_counter()

    def add(self, step: int, **values: float | int | str | bool) -> None:
        """Record `values` at `step`, with `seconds` since the last record; whole numbers and text stay as they are."""
        now = time.perf_counter()
        record: Record = {"step": step, "seconds": round(now - self._mark, 4)}
        record |= {name: _finite(value) for name, value in values.items()}
        self._mark = now
        self.records.append(record)
        for watch in self._watchers:
            watch(record)

    def jsonl(self) -> bytes:
        """All records, one JSON object per line."""
        return "".join(json.dumps(record) + "\n" for record in self.records).encode()


def pipes_watcher(context: Any, every: int) -> Watcher:
    """Send every `every`-th training record, and every other kind of record, to Dagster as a custom message {"metrics":
    record}.
    """
    count = 0

    def watch(record: Record) -> None:
        nonlocal count
        if "loss" in record:
            count += 1
        if "loss" not in record or (count - 1) % every == 0:
            context.report_custom_message({"metrics": record})

    return watch


def _finite(value: float | int | str | bool) -> float | int | str | bool | None:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return round(value, 8) if abs(value) >= 0.01 else float(f"{value:.6g}")
