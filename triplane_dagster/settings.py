"""Find steps whose recorded slice differs from the experiment's current settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from contracts.artifacts import Artifact, find_artifact
from contracts.digests import digest_of
from contracts.store import Store
from ops.graph import graph_of
from ops.inputs import find_inputs
from ops.spec import StepSpec
from ops.state import IterationState
from resources.experiment import Experiment
from resources.refs import read_artifact


def changed_steps(store: Store, experiment: Experiment, iterations: Sequence[str]) -> list[str]:
    """Steps of the base policy and of these iterations whose recorded slice differs from the experiment's, in graph
    order.
    """
    graph = graph_of(experiment)
    states = [
        IterationState(experiment, store, iteration, pinned=find_inputs(store, experiment, iteration))
        for iteration in iterations
    ]
    return [
        spec.name
        for spec in graph
        if any(_changed(spec, state) for state in ([IterationState(experiment, store)] if spec.once else states))
    ]


def _changed(spec: StepSpec, state: IterationState) -> bool:
    if spec.recorded_by is None:
        return False
    made = read_artifact(state.store, state.experiment.name, spec.name, state.partition)
    slices = _slices(spec, state, made) if made else iter(())
    return any(digest_of(recorded) != digest_of(now) for recorded, now in slices)


def _slices(spec: StepSpec, state: IterationState, made: Artifact) -> Iterator[tuple[Any, Any]]:
    """(recorded slice, the experiment's slice) of the step and of the parents that it makes itself."""
    record = find_artifact(state.store, spec.recorded_by, made.ref.key) if spec.recorded_by else made
    if record is not None:
        yield record.manifest.config, spec.own_config(state)
    if spec.part_slices is not None:
        yield from spec.part_slices(state, made)
