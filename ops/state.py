"""What a step of an iteration finds: the experiment, the store, and the artifacts that earlier steps made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from pydantic import Field

from contracts.artifacts import ArtifactRef, Frozen, open_artifact
from contracts.store import Store
from resources.experiment import Experiment


class Start(Frozen):
    """What training goes on from."""

    checkpoint: ArtifactRef
    trainer_state: ArtifactRef


class IterationInputs(Frozen):
    """What one iteration starts from, by digest."""

    experiment: str
    iteration: str
    policy: ArtifactRef
    """The checkpoint that acts."""
    start: Start
    task_suite: ArtifactRef
    base: ArtifactRef
    """The base policy's checkpoint."""
    cursor: int
    """Prompts drawn by earlier iterations."""
    carried_over: list[str] = Field(default_factory=list)
    """Episode ids taken over unfinished from an earlier iteration."""


@dataclass(frozen=True)
class IterationState:
    """One iteration of an experiment (or its base, without an iteration) as far as it is made."""

    experiment: Experiment
    store: Store
    partition: str | None = None
    """Iteration key such as "0003"; None for the assets that are made once."""
    made: Mapping[str, ArtifactRef] = field(default_factory=dict)
    """Artifacts by asset."""
    pinned: IterationInputs | None = None
    """Content of `iteration_inputs`; None while the iteration has not begun."""

    @property
    def iteration(self) -> str:
        """The iteration key of a partitioned asset."""
        assert self.partition is not None, "assets that are made once have no iteration"
        return self.partition

    @property
    def inputs(self) -> IterationInputs:
        """The pinned inputs of an iteration that has begun."""
        assert self.pinned is not None, "the step is not given iteration_inputs"
        return self.pinned

    def find(self, source: str) -> ArtifactRef | None:
        """The artifact behind an asset's name or, as `iteration_inputs.policy`, behind a field of the pinned inputs.

        None: not made yet.
        """
        asset, _, field_path = source.partition(".")
        if not field_path:
            return self.made.get(asset)
        found: ArtifactRef | None = attrgetter(field_path)(self.pinned) if self.pinned else None
        return found


def read_inputs(store: Store, ref: ArtifactRef) -> IterationInputs:
    """Content of an `iteration_inputs` artifact."""
    return IterationInputs.model_validate(open_artifact(store, ref).json("inputs.json"))
