"""Surrogate objectives and divergences as pure functions of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""In nats. Clip bounds are far below (exp(20) is 4.9e8), so this bound changes no clipped update; it keeps exp() finite
in float32, which overflows above exp(88.7).
"""


def bounded(logarithm: Tensor) -> Tensor:
    """`logarithm` cut to +-LOG_RATIO_BOUND; beyond it there is no gradient."""
    return logarithm.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and max(that, dual_clip * A) where A < 0.

    PPO's surrogate (arXiv:1707.06347, equation 7) with DAPO's asymmetric clip (arXiv:2503.14476, equation 8) and dual
    clip (arXiv:1912.09729, equation 3). Also returns which terms are clipped and dual-clipped.
    """
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    least = plain.minimum(clipped)
    if dual_clip is None:
        return least, clipped < plain, advantages.new_zeros(advantages.shape).bool()
    floor = dual_clip * advantages
    kept = least.maximum(floor).where(advantages < 0, least)
    return kept, clipped < plain, (advantages < 0) & (least < floor)


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r, an estimate of KL(q || p) from samples of q, where r = p / q.

    J. Schulman, "Approximating KL divergence", 2020.
    """
    return log_ratio.exp() - 1 - log_ratio


def sequence_sum(values: Tensor, owners: Tensor, sequences: int) -> Tensor:
    """Sum of `values` [tokens] over the tokens of each sequence, [sequences]."""
    return values.new_zeros(sequences).index_add(0, owners, values)
