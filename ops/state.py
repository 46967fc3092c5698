"""State of an iteration that a step reads: the experiment, the store, and the artifacts of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from contracts.artifacts import ArtifactRef, Frozen, find_artifact, open_artifact
from contracts.digests import action_key
from contracts.store import Store
from curation.tasks.difficulty.config import DifficultyConfig
from inference.rollouts.plan import CARRIED_OVER
from resources.experiment import Experiment

TRAINING_START = "training_start"
"""Kind of the artifact with the start of an iteration that was sampled ahead."""


class Start(Frozen):
    """Checkpoint and trainer state that training continues from."""

    checkpoint: ArtifactRef
    trainer_state: ArtifactRef


class Replayed(Frozen):
    """What an iteration of a fork takes from its source instead of sampling."""

    experiment: str
    iteration: str
    """Experiment and iteration that sampled it: those of the source, or of the source's own source."""
    prompts: ArtifactRef
    rollouts: ArtifactRef

    def __str__(self) -> str:
        return f"{self.experiment}/{self.iteration}"


class IterationInputs(Frozen):
    """References to everything that one iteration starts from."""

    experiment: str
    iteration: str
    policy: ArtifactRef
    """The acting checkpoint."""
    start: Start | None
    """Start of the training; None until the training of an iteration that was sampled ahead begins."""
    task_suite: ArtifactRef
    base: ArtifactRef
    """The base policy's checkpoint."""
    cursor: int
    """Prompts drawn by earlier iterations."""
    carried_over: list[ArtifactRef] = Field(default_factory=list, max_length=1)
    """What the iteration before left unfinished (`rollouts.carry_over`), if anything."""
    replayed: Replayed | None = None
    """Set for an iteration of a fork that repeats one of its source."""
    difficulty: ArtifactRef | None = None
    """Estimates by which training tasks are selected; None: all are drawn."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields, without `difficulty` if unset, so that digests stay as they are without it."""
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if name != "difficulty" or value is not None}

    @property
    def carried(self) -> dict[str, ArtifactRef]:
        """`carried_over` by its role in the lineage."""
        return {CARRIED_OVER: self.carried_over[0]} if self.carried_over else {}

    @property
    def started(self) -> Start:
        """Start of a training that has begun."""
        assert self.start is not None, "the training has not begun"
        return self.start


@dataclass(frozen=True)
class IterationState:
    """Materialized part of one iteration of an experiment, or of its base."""

    experiment: Experiment
    store: Store
    partition: str | None = None
    """Iteration key such as "0003"; None for unpartitioned assets."""
    made: Mapping[str, ArtifactRef] = field(default_factory=dict)
    """Artifacts by asset."""
    pinned: IterationInputs | None = None
    """Content of `iteration_inputs`; None before the iteration begins."""

    @property
    def iteration(self) -> str:
        """The iteration key of a partitioned asset."""
        assert self.partition is not None, "unpartitioned assets have no iteration"
        return self.partition

    @property
    def inputs(self) -> IterationInputs:
        """The pinned inputs of an iteration that has begun."""
        assert self.pinned is not None, "the step is not given iteration_inputs"
        return self.pinned

    @property
    def sampled_as(self) -> dict[str, str]:
        """Experiment and iteration that sample the episodes: those of the source in an iteration that repeats one."""
        found = self.pinned.replayed if self.pinned else None
        where = (found.experiment, found.iteration) if found else (self.experiment.name, self.iteration)
        return dict(zip(("experiment", "iteration"), where, strict=True))

    @property
    def difficulty(self) -> DifficultyConfig | None:
        """Range of pass rates that tasks are drawn from. None also for an iteration that began without estimates."""
        return None if self.pinned and self.pinned.difficulty is None else self.experiment.tasks.difficulty

    @property
    def carried_over(self) -> dict[str, ArtifactRef]:
        """What the iteration before left unfinished, by its role in the lineage; empty if nothing."""
        return self.pinned.carried if self.pinned else {}

    def replayed(self, asset: str) -> ArtifactRef | None:
        """Artifact of an asset that this iteration takes from its source, or None."""
        found = self.pinned.replayed if self.pinned else None
        return {"prompts": found.prompts, "rollouts": found.rollouts}.get(asset) if found else None

    def find(self, source: str) -> ArtifactRef | None:
        """Artifact of an asset or, for a source such as `iteration_inputs.policy`, of a field of the pinned inputs.

        Returns None if it does not exist yet.
        """
        asset, _, field_path = source.partition(".")
        if not field_path:
            return self.made.get(asset)
        if self.pinned is None or (field_path.startswith("start.") and self.pinned.start is None):
            return None
        found: ArtifactRef = attrgetter(field_path)(self.pinned)
        return found


def read_inputs(store: Store, ref: ArtifactRef) -> IterationInputs:
    """Content of an `iteration_inputs` artifact, with the start of training if that was pinned later."""
    inputs = IterationInputs.model_validate(open_artifact(store, ref).json("inputs.json"))
    if inputs.start is None:
        started = find_artifact(store, TRAINING_START, training_start_key(ref))
        if started is not None:
            inputs = inputs.model_copy(update={"start": Start.model_validate(started.json("start.json"))})
    return inputs


def training_start_key(inputs: ArtifactRef) -> str:
    """Key of the start of training of an iteration with these inputs; written once."""
    return action_key(TRAINING_START, {"iteration_inputs": inputs.digest}, {}, "1")
