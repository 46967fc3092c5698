"""Context of a step that is being run, and its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass

import dagster as dg

from contracts.store import Store
from ops.results import present
from resources.experiment import Experiment
from resources.progress import Progress, ProgressSink

OBSERVE_EVERY_S = 5.0
"""Seconds between two observations of one step: enough for a plot to move, few enough for the event log."""

Context = dg.OpExecutionContext | dg.AssetExecutionContext


class StepProgress:
    """Reports every update to the sink and some to Dagster, every few seconds."""

    def __init__(
        self, context: Context, experiment: str, asset: str, partition: str | None, sink: ProgressSink
    ) -> None:
        self._context, self._sink = context, sink
        self._key = dg.AssetKey([experiment, asset])
        self._asset, self._partition = asset, partition
        self._observed = time.monotonic()

    def update(self, phase: str, done: float, total: float | None, **numbers: float) -> None:
        """Report progress. numbers: measurements for plots."""
        self._sink(Progress(self._asset, self._partition, phase, done, total, numbers))
        now = time.monotonic()
        if now - self._observed >= OBSERVE_EVERY_S:
            self._observed = now
            values = {f"{phase} done": float(done), **{name: float(value) for name, value in numbers.items()}}
            self._context.log_event(dg.AssetObservation(self._key, partition=self._partition, metadata=present(values)))


@dataclass(frozen=True)
class Step:
    """Context that the functions of this package receive."""

    experiment: Experiment
    asset: str
    partition: str | None
    """Iteration key such as "0003", or None for unpartitioned assets."""
    store: Store
    progress: StepProgress
    context: Context

    @property
    def iteration(self) -> str:
        """Iteration key of a partitioned asset."""
        assert self.partition is not None, f"{self.asset} is not partitioned"
        return self.partition


def begin(context: Context, experiment: Experiment, asset: str, store: Store, sink: ProgressSink) -> Step:
    """Begin the step that `context` runs."""
    partition = context.partition_key if context.has_partition_key else None
    progress = StepProgress(context, experiment.name, asset, partition, sink)
    return Step(experiment, asset, partition, store, progress, context)
