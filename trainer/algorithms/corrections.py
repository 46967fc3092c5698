"""Corrections for the difference between sampler and trainer, apart from the algorithm's own ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer.algorithms.base import Tokens
from trainer.algorithms.surrogates import sequence_sum
from trainer.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

MASKS = ("ratio_mask", "probability_gap", "sequence_rejection", "veto")
"""Corrections that drop tokens."""


class RatioMask(Settings):
    """Bounds of the trainer / sampler probability ratio of a token."""

    low: float = Field(default=0.5, ge=0, le=1)
    """Tokens with a smaller ratio are dropped."""
    high: float = Field(default=5.0, ge=1)
    """Tokens with a larger ratio are dropped."""


class ProbabilityGap(Settings):
    """Bounds of the difference between a token's probability under the weights in training and the sampler's."""

    low: float = Field(default=0.2, ge=0)
    """Tokens of negative advantage are dropped whose probability is lower than the sampler's by more than this."""
    high: float = Field(default=0.2, ge=0)
    """Tokens of positive advantage are dropped whose probability is higher than the sampler's by more than this."""


class SequenceRejection(Settings):
    """Bounds of the trainer / sampler probability ratio of a sequence."""

    ratio: Literal["geometric", "product"] = "geometric"
    """Geometric mean or product of the ratios of the sequence's tokens."""
    low: float = Field(gt=0, le=1)
    """Sequences with a smaller ratio are dropped."""
    high: float = Field(ge=1)
    """Sequences with a larger ratio are dropped."""


class Corrections(Settings):
    """Corrections for the difference between sampler and trainer. They combine; null switches one off.

    A dropped token has no gradient and still counts in the aggregation's divisor.
    """

    importance_cap: float | None = Field(default=2.0, gt=0)
    """Truncated importance sampling: the objective is weighted by the trainer / sampler probability ratio, at most this
    (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). null: weight 1.
    """
    ratio_mask: RatioMask | None = None
    """Drop tokens whose ratio is out of bounds: IcePop (arXiv:2510.18855), together with an `importance_cap` that is
    not below `high`.
    """
    probability_gap: ProbabilityGap | None = None
    """Drop tokens that are already far from the sampler in the direction of their advantage: prime-rl's mask
    (DPPO's total-variation mask, arXiv:2602.04879).
    """
    sequence_rejection: SequenceRejection | None = None
    """Drop sequences whose ratio is out of bounds."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Drop sequences that have a token whose ratio is below this."""


@dataclass(frozen=True)
class Corrected:
    """Effect of the corrections on a microbatch."""

    weight: Tensor | None
    """float32 [tokens]: importance weights, without gradient; None if all are 1."""
    dropped: dict[str, Tensor]
    """bool [tokens] of each configured mask, by its name in MASKS."""

    @property
    def keep(self) -> Tensor | None:
        """bool [tokens]: tokens that no mask drops; None if none is configured."""
        masks = list(self.dropped.values())
        if not masks:
            return None
        lost = masks[0]
        for mask in masks[1:]:
            lost = lost | mask
        return ~lost


def correct(corrections: Corrections, tokens: Tokens) -> Corrected:
    """Weights and masks of `tokens`.

    k = exp(old - sampler) is the trainer / sampler probability ratio of a token. importance_cap: min(k, cap).
    ratio_mask: drops k outside [low, high]. probability_gap: with d = exp(logprobs) - exp(sampler), drops d > high
    where A > 0 and d < -low where A < 0. sequence_rejection: the same bounds for exp of the mean or sum of log k over
    a sequence. veto: drops a sequence with any k below it.
    """
    mismatch = tokens.old - tokens.sampler
    cap = corrections.importance_cap
    dropped: dict[str, Tensor] = {}
    if (mask := corrections.ratio_mask) is not None:
        ratio = mismatch.exp()
        dropped["ratio_mask"] = (ratio < mask.low) | (ratio > mask.high)
    if (gap := corrections.probability_gap) is not None:
        moved, advantages = tokens.logprobs.detach().exp() - tokens.sampler.exp(), tokens.advantages
        dropped["probability_gap"] = ((advantages > 0) & (moved > gap.high)) | ((advantages < 0) & (moved < -gap.low))
    if (bounds := corrections.sequence_rejection) is not None:
        whole = sequence_sum(mismatch, tokens.owners, len(tokens.lengths))
        whole = whole / tokens.lengths if bounds.ratio == "geometric" else whole
        dropped["sequence_rejection"] = ((whole < math.log(bounds.low)) | (whole > math.log(bounds.high)))[
            tokens.owners
        ]
    if corrections.veto is not None:
        below = (mismatch < math.log(corrections.veto)).to(mismatch.dtype)
        dropped["veto"] = (sequence_sum(below, tokens.owners, len(tokens.lengths)) > 0)[tokens.owners]
    return Corrected(mismatch.exp().clamp(max=cap) if cap is not None else None, dropped)
