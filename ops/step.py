"""One step of one iteration while it is being made, and its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import dagster as dg

from contracts.artifacts import ArtifactRef
from contracts.store import Store
from ops.inputs import read_inputs
from ops.results import present
from ops.spec import StepSpec, Work
from ops.state import IterationInputs, IterationState
from resources.experiment import Experiment
from resources.progress import Progress, ProgressSink

OBSERVE_EVERY_S = 5.0
"""Seconds between two observations of one step: enough for a plot to move, few enough for the event log."""

Context = dg.OpExecutionContext | dg.AssetExecutionContext


class StepProgress:
    """Tells the sink everything and Dagster something every few seconds."""

    def __init__(
        self, context: Context, experiment: str, asset: str, partition: str | None, sink: ProgressSink
    ) -> None:
        self._context, self._sink = context, sink
        self._key = dg.AssetKey([experiment, asset])
        self._asset, self._partition = asset, partition
        self._observed = time.monotonic()

    def update(self, phase: str, done: float, total: float | None, **numbers: float) -> None:
        """Report where the step is. numbers: measurements worth a plot."""
        self._sink(Progress(self._asset, self._partition, phase, done, total, numbers))
        now = time.monotonic()
        if now - self._observed >= OBSERVE_EVERY_S:
            self._observed = now
            values = {f"{phase} done": float(done), **{name: float(value) for name, value in numbers.items()}}
            self._context.log_event(dg.AssetObservation(self._key, partition=self._partition, metadata=present(values)))


@dataclass(frozen=True)
class Step:
    """What the functions of this package are told."""

    spec: StepSpec
    state: IterationState
    progress: StepProgress
    context: Context

    @property
    def experiment(self) -> Experiment:
        """The experiment that the step belongs to."""
        return self.state.experiment

    @property
    def store(self) -> Store:
        """Where artifacts are."""
        return self.state.store

    @property
    def iteration(self) -> str:
        """The iteration key of a partitioned asset."""
        return self.state.iteration

    @property
    def inputs(self) -> IterationInputs:
        """What the iteration was pinned to, for a step that is given `iteration_inputs`."""
        return self.state.inputs

    @cached_property
    def work(self) -> Work:
        """The work of this step, all of whose inputs are there."""
        work = self.spec.work(self.state)
        assert work is not None, f"{self.spec.name} is run without its inputs"
        return work

    def parent(self, role: str) -> ArtifactRef:
        """The input of this role, as the step declares it."""
        return self.work.parents[role]


def begin(
    context: Context,
    experiment: Experiment,
    spec: StepSpec,
    store: Store,
    sink: ProgressSink,
    given: Mapping[str, ArtifactRef] | None = None,
) -> Step:
    """The step that `context` runs. given: the artifacts of the assets upstream, by asset."""
    partition = context.partition_key if context.has_partition_key else None
    made = {asset: given[asset] for asset in spec.upstream} if given else {}  # Dagster gives them in order of name
    pinned = read_inputs(store, made["iteration_inputs"]) if "iteration_inputs" in made else None
    progress = StepProgress(context, experiment.name, spec.name, partition, sink)
    return Step(spec, IterationState(experiment, store, partition, made, pinned), progress, context)
