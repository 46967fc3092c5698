"""Trainer state: data beyond the checkpoint to continue training exactly. Safetensors and JSON, never pickle.

`state.safetensors` has `master.<parameter>` and the optimizer's tensors, in a snapshot also `loop.<name>`; `state.json`
the step and the optimizer's name. A state above 4 GB is stored in parts: see `contracts.tensor_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from contracts.adapters import Adapter, factor_shapes
from contracts.architectures import parameter_shapes
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.failpoints import failpoint
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from trainer.errors import TrainingDataError
from trainer.parameters import Parameters
from trainer.precision import DEFAULT, precision_of
from trainer.tensors import StagedTensors, StoredTensors, save_tensors

OptimizerName = Literal["none", "muon", "adamw"]
STATE = "state.safetensors"
MASTER, LOOP = "master.", "loop."
NONE: Mapping[str, Tensor] = MappingProxyType({})
"""No tensors."""


@dataclass(frozen=True)
class TrainerState:
    """Trainer state in memory."""

    masters: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    """Argument of the optimizer's `load`; empty for "none"."""
    optimizer_name: OptimizerName
    step: int
    """Optimizer steps taken since the base policy began."""
    extra: dict[str, Any]
    """Further state of the training loop."""
    recipe: str = DEFAULT.kind
    """Kind of `trainer.precision`."""
    loop: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the training loop that no step changes, only in a snapshot."""
    staged: StagedTensors | None = None
    """Tensors that the ranks have written to their disks; then this object has none itself."""

    def copied(self) -> TrainerState:
        """The same state on the CPU, which later steps do not change."""

        def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

        masters, optimizer = copies(self.masters), copies(self.optimizer)
        return replace(self, masters=masters, optimizer=optimizer, extra=deepcopy(self.extra))


def capture_state(
    parameters: Parameters, optimizer: Mapping[str, Tensor], name: OptimizerName, step: int, extra: dict[str, Any]
) -> TrainerState:
    """Current state; tensors are shared, not copied."""
    recipe = precision_of(parameters.config).kind
    return TrainerState(dict(parameters.masters()), dict(optimizer), name, step, extra, recipe)


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
        return commit_state(out, state)


def commit_state(out: ArtifactWriter, state: TrainerState) -> Artifact:
    """Write `state` to an artifact's stage and commit it."""
    tensors = {f"{MASTER}{name}": tensor for name, tensor in state.masters.items()} | dict(state.optimizer)
    tensors |= {f"{LOOP}{name}": tensor for name, tensor in state.loop.items()}
    save_tensors(out, STATE, state.staged or tensors)
    failpoint("state-staged")
    body = {"step": state.step, "recipe": state.recipe, "optimizer": state.optimizer_name, "extra": state.extra}
    out.add_json("state.json", body)
    return out.commit(meta={"step": state.step, "optimizer": state.optimizer_name})


def follow_state(state: TrainerState) -> None:
    """Take part in rank 0's `publish_state` or `commit_state`. Every other rank must call this. Raises RanksLost."""
    if state.staged is not None:
        state.staged.put(None, STATE)


def load_state(
    artifact: Artifact, config: Mapping[str, Any], adapter: Adapter | None = None, *, lazily: bool = False
) -> TrainerState:
    """Load a state that `publish_state` committed, for a model with this config.json. adapter: whose factors are the
    masters, if it is not None.

    lazily: read each tensor when it is used, for ranks that keep a part of each. Raises TrainingDataError if state and
    model do not match.
    """
    files, body = TensorFiles(artifact.directory(), STATE), artifact.json("state.json")
    forms = {name.removeprefix(MASTER): form[1] for name, form in files.forms.items() if name.startswith(MASTER)}
    if forms != (parameter_shapes(config) if adapter is None else factor_shapes(config, adapter)):
        raise TrainingDataError(
            f"{artifact.ref.uri} does not fit the checkpoint's config: pass the trainer_state of the same key as the"
            " checkpoint"
        )
    rest = [name for name in files.forms if not name.startswith((MASTER, LOOP))]
    masters: Mapping[str, Tensor] = StoredTensors(files, MASTER, forms)
    optimizer: Mapping[str, Tensor] = StoredTensors(files, "", rest)
    loop = [name.removeprefix(LOOP) for name in files.forms if name.startswith(LOOP)]
    return TrainerState(
        masters=masters if lazily else dict(masters),
        optimizer=optimizer if lazily else dict(optimizer),
        optimizer_name=body["optimizer"],
        step=body["step"],
        extra=body["extra"],
        recipe=body["recipe"],
        loop=dict(StoredTensors(files, LOOP, loop)),
    )
