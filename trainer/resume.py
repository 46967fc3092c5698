"""Continue from a checkpoint and its trainer state."""

from __future__ import annotations

import torch

from contracts.artifacts import ArtifactRef
from trainer.errors import TrainingDataError
from trainer.parameters import Parameters
from trainer.state import TrainerState


def resume_parameters(
    loaded: Parameters, state: TrainerState, checkpoint: ArtifactRef, saved: ArtifactRef
) -> Parameters:
    """Parameters with the masters of the state.

    Raises TrainingDataError unless they quantize exactly to the checkpoint `loaded`.
    """
    parameters = Parameters.from_masters(loaded.config, state.masters)
    for ours, theirs in zip(parameters.buffers, loaded.buffers, strict=True):
        same = torch.equal(ours.leaf, theirs.leaf)
        if not same:
            raise TrainingDataError(
                f"trainer_state {saved.short} does not quantize to checkpoint {checkpoint.short}: pass the two of"
                " one key"
            )
    return parameters
