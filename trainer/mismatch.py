"""How far the trainer's log probabilities are from the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algorithms.surrogates import bounded, k3


def mismatch_metrics(trainer: Sequence[Tensor], sampler: Sequence[Tensor]) -> dict[str, float]:
    """Numbers to report. trainer, sampler: log probabilities of each row's tokens under the same weights.

    sampler_mismatch_max: largest difference of log probabilities. mismatch_k1 and mismatch_k3: estimates of KL(sampler
    || trainer), nats a token. mismatch_max_dp: largest difference of probabilities. effective_sample_size: share of the
    tokens, (sum of k)^2 / (n * sum of k^2) with k = trainer / sampler.
    """
    ours, theirs = torch.cat(list(trainer)).double(), torch.cat(list(sampler)).double()
    difference = ours - theirs
    near = bounded(difference)
    weights = near.exp()
    return {
        "sampler_mismatch_max": float(difference.abs().max()),
        "mismatch_k1": float(-difference.mean()),
        "mismatch_k3": float(k3(near).mean()),
        "mismatch_max_dp": float((ours.exp() - theirs.exp()).abs().max()),
        "effective_sample_size": float(weights.sum().square() / (len(weights) * weights.square().sum())),
    }
