"""Plan of a run, without running it: each step's key, whether its artifact exists, and where it would run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from contracts.artifacts import find_artifact
from contracts.digests import digest_of
from contracts.store import Store, open_store
from ops.graph import graph_of
from ops.inputs import find_inputs
from ops.replay import preview
from ops.state import IterationState
from resources.experiment import Experiment
from triplane_dagster.iterations import next_partition
from triplane_dagster.memory import training_note


@dataclass(frozen=True)
class PlannedStep:
    """One step of the next iteration, or of the base."""

    step: str
    partition: str | None
    key: str | None
    """Action key; None while it depends on a missing artifact of an earlier step."""
    state: str
    """found: the artifact is committed. will run: it is missing, or its key is not yet known."""
    config: str
    """Digest of the step's own slice of the experiment."""
    where: str
    """Location where the step would run."""
    note: str | None = None
    """Note about the step, e.g. the error rates of the decision."""


def plan_of(experiment: Experiment, store: Store | None = None) -> list[PlannedStep]:
    """The base assets and the next iteration, in graph order."""
    return list(_planned(experiment, store or open_store()))


def _planned(experiment: Experiment, store: Store) -> Iterator[PlannedStep]:
    partition = next_partition(store, experiment)
    pinned = find_inputs(store, experiment, partition) or (preview(store, experiment) if not int(partition) else None)
    state = IterationState(experiment, store, partition, pinned=pinned)
    for spec in graph_of(experiment):
        key = spec.key(state)
        found = find_artifact(store, spec.writes, key) if key else None
        yield PlannedStep(
            step=spec.name,
            partition=None if spec.once else partition,
            key=key,
            state="found" if found else "will run",
            config=digest_of(spec.slice(state)),
            where=spec.place(experiment),
            note=spec.note(state) if spec.note else training_note(experiment) if spec.name == "checkpoint" else None,
        )
        if found is not None:
            state = replace(state, made={**state.made, spec.name: found.ref})
