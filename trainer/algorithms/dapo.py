"""DAPO's policy loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.algorithms.base import Advantage, RewardAdvantage, TokenAlgorithm


class Dapo(RewardAdvantage, TokenAlgorithm):
    """DAPO (arXiv:2503.14476, equation 8): clip-higher and a mean over all tokens. Its dynamic sampling is
    `rollouts.refill` with `dataset.drop_zero_variance`.
    """

    kind: Literal["dapo"] = "dapo"
    """Selects DAPO."""
    advantage: Advantage = "group_mean_std"
    clip_high: float = Field(default=0.28, ge=0)
