"""Continue from a checkpoint and its trainer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import Adapter, read_adapter
from contracts.artifacts import Artifact, ArtifactRef
from contracts.precision import exported_forward
from trainer.adapters import adapt, draw_factors, read_factors, require_same_factors
from trainer.continuing import require_same_adapter
from trainer.critic import PREFIX as CRITIC
from trainer.errors import TrainingConfigError, TrainingDataError
from trainer.export import load_checkpoint
from trainer.parameters import Parameters
from trainer.snapshots import Snapshots
from trainer.state import TrainerState, load_state


def open_parameters(
    begin: Artifact,
    saved: Artifact,
    adapter: Adapter | None,
    seed: int,
    snapshots: Snapshots | None = None,
) -> tuple[Parameters, TrainerState]:
    """Weights to train and their state: those of the latest snapshot, or of checkpoint `begin` and its state `saved`.

    adapter: to train in place of the weights. It continues the checkpoint's own, or begins at the base with factors
    drawn by `seed` and a fresh optimizer. Raises TrainingConfigError, TrainingDataError, SnapshotRefused.
    """
    loaded = load_checkpoint(begin.directory())
    require_adaptable(begin, loaded.config, adapter)
    snapshot = snapshots.latest(loaded.config, adapter) if snapshots else None
    if snapshot is not None:
        return with_masters(loaded, adapter, snapshot), snapshot
    if adapter is not None:
        factors, state = open_factors(begin, saved, loaded.config, adapter, seed)
        return adapt(loaded, adapter, factors), state
    state = load_state(saved, loaded.config)
    return resume_parameters(loaded, state, begin.ref, saved.ref), state


def require_adaptable(begin: Artifact, model: Mapping[str, Any], adapter: Adapter | None) -> None:
    """Raise TrainingConfigError unless `adapter` can be trained beside checkpoint `begin`, which has this config.json.
    None: all weights are trained.
    """
    require_same_adapter(read_adapter(begin.directory(), model), adapter, begin.ref)
    forward = exported_forward(dict(model))
    if adapter is not None and forward.rounds:
        raise TrainingConfigError(
            f"adapters are merged in float32, but checkpoint {begin.ref.short} is of {forward}: use trainer.precision"
            " w8 or fp32 with float32 head and router"
        )


def open_factors(
    begin: Artifact, saved: Artifact, model: Mapping[str, Any], adapter: Adapter, seed: int
) -> tuple[dict[str, Tensor], TrainerState]:
    """Factors to train beside checkpoint `begin`, and their state: the checkpoint's own, or fresh ones and a fresh
    optimizer. Raises TrainingDataError.
    """
    found = read_adapter(begin.directory(), model)
    state = load_state(saved, model, found, lazily=found is None)
    if found is None:
        own = {name: state.optimizer[name] for name in state.optimizer if name.startswith(CRITIC)}
        return draw_factors(model, adapter, seed), replace(state, masters={}, optimizer=own, optimizer_name="none")
    factors = read_factors(begin.directory(), model, adapter)
    require_same_factors(factors, state.masters, begin.ref)
    return factors, state


def with_masters(base: Parameters, adapter: Adapter | None, state: TrainerState) -> Parameters:
    """Parameters with the masters of `state`: factors of `adapter` over `base`, or all weights."""
    if adapter is not None:
        return adapt(base, adapter, state.masters)
    return Parameters.from_masters(base.config, state.masters)


def resume_parameters(
    loaded: Parameters, state: TrainerState, checkpoint: ArtifactRef, saved: ArtifactRef
) -> Parameters:
    """Parameters with the masters of the state.

    Raises TrainingDataError unless they quantize exactly to the checkpoint `loaded`, or are its dequantized weights: an
    imported FP8 original may have scales that quantization would not choose.
    """
    if all(torch.equal(state.masters[name], master) for name, master in loaded.masters()):
        return loaded
    parameters = Parameters.from_masters(loaded.config, state.masters)
    for ours, theirs in zip(parameters.buffers, loaded.buffers, strict=True):
        same = torch.equal(ours.leaf, theirs.leaf)
        if not same:
            raise refuse(checkpoint, saved)
    return parameters


def refuse(checkpoint: ArtifactRef, saved: ArtifactRef) -> TrainingDataError:
    """Error of a trainer state that is not the checkpoint's."""
    return TrainingDataError(
        f"trainer_state {saved.short} does not quantize to checkpoint {checkpoint.short}: pass the two of one key"
    )
