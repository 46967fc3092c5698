"""The training side's logprobs of given tokens under an exported checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.data import ScoredSequence, make_batch
from trainer.export import load_checkpoint
from trainer.model import score


def trainer_scores(directory: Path, sequences: list[list[int]]) -> list[Tensor]:
    """Of each token given those before it, 0.0 at index 0, as `Engine.score` gives them."""
    parameters = load_checkpoint(directory)
    rows = [ScoredSequence(np.asarray(tokens, np.int64), np.arange(1, len(tokens))) for tokens in sequences]
    batch = make_batch(rows)
    with torch.no_grad():
        logprobs = score(parameters.leaves, parameters.config, batch).logprobs
    return [torch.cat([torch.zeros(1), logprobs[batch.owners == index]]) for index in range(len(rows))]
