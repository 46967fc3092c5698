"""Trainer state: data beyond the checkpoint to continue training exactly. Safetensors and JSON, never pickle.

`state.safetensors` has `master.<parameter>` and the optimizer's tensors; `state.json` the step and the optimizer's
name. A state above 4 GB is stored in parts: see `contracts.tensor_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.digests import action_key
from contracts.failpoints import failpoint
from contracts.qwen3_moe import parameter_shapes
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from trainer.config import SNAPSHOT, SNAPSHOT_JOB
from trainer.errors import TrainingDataError
from trainer.export import RECIPE
from trainer.parameters import Parameters
from trainer.tensors import read_tensor, save_tensors

OptimizerName = Literal["none", "muon", "adamw"]
STATE = "state.safetensors"
_MASTER = "master."


@dataclass(frozen=True)
class TrainerState:
    """Trainer state in memory."""

    masters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """Argument of the optimizer's `load`; empty for "none"."""
    optimizer_name: OptimizerName
    step: int
    """Optimizer steps taken since the base policy began."""
    extra: dict[str, Any]
    """Further state of the training loop."""


def capture_state(
    parameters: Parameters, optimizer: Mapping[str, Tensor], name: OptimizerName, step: int, extra: dict[str, Any]
) -> TrainerState:
    """Current state; tensors are shared, not copied."""
    return TrainerState(dict(parameters.masters()), dict(optimizer), name, step, extra)


def publish_state(
    store: Store,
    kind: str,
    key: str,
    state: TrainerState,
    *,
    parents: Mapping[str, ArtifactRef],
    config: Mapping[str, Any],
    code_version: str,
) -> Artifact:
    """Commit `state` as an artifact of `kind`."""
    with ArtifactWriter(store, kind, key, parents=parents, config=config, code_version=code_version) as out:
        tensors = {f"{_MASTER}{name}": tensor for name, tensor in state.masters.items()} | state.optimizer
        save_tensors(out, STATE, tensors)
        failpoint("state-staged")
        body = {"step": state.step, "recipe": RECIPE, "optimizer": state.optimizer_name, "extra": state.extra}
        out.add_json("state.json", body)
        return out.commit(meta={"step": state.step, "optimizer": state.optimizer_name})


def load_state(artifact: Artifact, config: Mapping[str, Any]) -> TrainerState:
    """Load a state that `publish_state` committed, for a model with this config.json.

    Raises TrainingDataError if they do not match.
    """
    files, body = TensorFiles(artifact.directory(), STATE), artifact.json("state.json")
    tensors = {name: read_tensor(files, name) for name in files.forms}
    masters = {name.removeprefix(_MASTER): tensor for name, tensor in tensors.items() if name.startswith(_MASTER)}
    found = {name: tuple(tensor.shape) for name, tensor in masters.items()}
    if found != parameter_shapes(config):
        raise TrainingDataError(
            f"{artifact.ref.uri} does not fit the checkpoint's config: pass the trainer_state of the same key as the"
            " checkpoint"
        )
    return TrainerState(
        masters=masters,
        optimizer={name: tensor for name, tensor in tensors.items() if not name.startswith(_MASTER)},
        optimizer_name=body["optimizer"],
        step=body["step"],
        extra=body["extra"],
    )


class Snapshots:
    """Crash-safe snapshots of one job, found by the job's key. Only the latest is kept."""

    kind = SNAPSHOT

    def __init__(self, store: Store, job_key: str, every: int, last: int) -> None:
        self._store, self._job = store, job_key
        self._steps = range(every, last + 1, every)

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after `step`."""
        return step in self._steps

    def latest(self) -> Artifact | None:
        """Snapshot of the highest step, or None."""
        for step in reversed(self._steps):
            found = find_artifact(self._store, self.kind, self._key(step))
            if found is not None:
                return found
        return None

    def save(self, state: TrainerState, config: Mapping[str, Any], code_version: str) -> None:
        """Commit `state`, then remove earlier snapshots."""
        key = self._key(state.step)
        described = {**config, SNAPSHOT_JOB: self._job}
        publish_state(self._store, self.kind, key, state, parents={}, config=described, code_version=code_version)
        failpoint("snapshot-committed")
        self._drop(step for step in self._steps if step < state.step)

    def clear(self) -> None:
        """Remove all snapshots."""
        self._drop(self._steps)

    def _drop(self, steps: Any) -> None:
        for step in steps:
            # the manifest sorts last, so after a kill the remaining files can still be found
            for key in self._store.list(f"artifacts/{self.kind}/{self._key(step)}/"):
                self._store.delete(key)

    def _key(self, step: int) -> str:
        return action_key(self.kind, {"job": self._job}, {"step": step}, "1")
