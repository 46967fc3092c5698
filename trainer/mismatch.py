"""How far the trainer's log probabilities are from the sampler's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainer.algorithms.surrogates import bounded, k3
from trainer.flat import pieces


def mismatch_metrics(trainer: Sequence[Tensor], sampler: Sequence[Tensor]) -> dict[str, float]:
    """Numbers to report. trainer, sampler: log probabilities of each row's tokens under the same weights.

    sampler_mismatch_max: largest difference of log probabilities. mismatch_k1 and mismatch_k3: estimates of KL(sampler
    || trainer), nats a token. mismatch_max_dp: largest difference of probabilities. effective_sample_size: share of the
    tokens, (sum of k)^2 / (n * sum of k^2) with k = trainer / sampler.
    """
    largest = apart = 0.0
    count, k1, k3_sum, weight, square = 0, 0.0, 0.0, 0.0, 0.0
    for ours, theirs in ((a.double(), b.double()) for a, b in zip(pieces(trainer), pieces(sampler), strict=True)):
        difference = ours - theirs
        near = bounded(difference)
        weights = near.exp()
        largest = max(largest, float(difference.abs().max()))
        apart = max(apart, float((ours.exp() - theirs.exp()).abs().max()))
        count += len(weights)
        k1 -= float(difference.sum())
        k3_sum += float(k3(near).sum())
        weight, square = weight + float(weights.sum()), square + float(weights.square().sum())
    return {
        "sampler_mismatch_max": largest,
        "mismatch_k1": k1 / count,
        "mismatch_k3": k3_sum / count,
        "mismatch_max_dp": apart,
        "effective_sample_size": weight**2 / (count * square),
    }
