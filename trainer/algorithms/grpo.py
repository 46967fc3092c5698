"""GRPO, group-relative policy optimization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.algorithms.base import Advantage, Aggregation, RewardAdvantage, TokenAlgorithm


class Grpo(RewardAdvantage, TokenAlgorithm):
    """GRPO (DeepSeekMath, arXiv:2402.03300, equation 3): clipped token ratios, averaged over each sequence."""

    kind: Literal["grpo"] = "grpo"
    """Selects GRPO."""
    advantage: Advantage = "group_mean_std"
    aggregation: Aggregation = "sequence"
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the estimate k3 of the KL divergence (equation 4). The reference is the iteration's starting weights,
    whose log probabilities are known; the paper's is the supervised policy, with weight 0.04, so the default is 0.
    """
