"""Context of a running step, and its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import dagster as dg

from contracts.artifacts import ArtifactRef
from contracts.store import Store
from ops.results import present
from ops.spec import StepSpec, Work
from ops.state import IterationInputs, IterationState, read_inputs
from resources.experiment import Experiment
from resources.progress import Progress, ProgressSink

OBSERVE_EVERY_S = 5.0
"""Seconds between two observations of one step: frequent enough for plots, rare enough for the event log."""

Context = dg.OpExecutionContext | dg.AssetExecutionContext


class StepProgress:
    """Reports every update to the sink, and one to Dagster every few seconds."""

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

    spec: StepSpec
    state: IterationState
    progress: StepProgress
    context: Context

    @property
    def experiment(self) -> Experiment:
        """Experiment of the step."""
        return self.state.experiment

    @property
    def store(self) -> Store:
        """Store of the artifacts."""
        return self.state.store

    @property
    def iteration(self) -> str:
        """Iteration key of a partitioned asset."""
        return self.state.iteration

    @property
    def inputs(self) -> IterationInputs:
        """Pinned inputs of the iteration, for a step that receives `iteration_inputs`."""
        return self.state.inputs

    @cached_property
    def work(self) -> Work:
        """Work of this step, whose inputs must exist."""
        work = self.spec.work(self.state)
        assert work is not None, f"{self.spec.name} is run without its inputs"
        return work

    def parent(self, role: str) -> ArtifactRef:
        """Declared input of this role."""
        return self.work.parents[role]


def begin(
    context: Context,
    experiment: Experiment,
    spec: StepSpec,
    store: Store,
    sink: ProgressSink,
    given: Mapping[str, ArtifactRef] | None = None,
) -> Step:
    """Start the step that `context` runs. given: artifacts of the upstream assets, by asset."""
    partition = context.partition_key if context.has_partition_key else None
    made = (
        {asset: given[asset] for asset in spec.upstream} if given else {}
    )  # Dagster passes them in alphabetical order
    pinned = read_inputs(store, made["iteration_inputs"]) if "iteration_inputs" in made else None
    progress = StepProgress(context, experiment.name, spec.name, partition, sink)
    return Step(spec, IterationState(experiment, store, partition, made, pinned), progress, context)
