"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

from typing import Literal

from trainer.algorithms.base import Aggregation, RewardAdvantage, TokenAlgorithm


class DrGrpo(RewardAdvantage, TokenAlgorithm):
    """Dr. GRPO (arXiv:2503.20783, figure 1 and section 3.2): GRPO with neither the standard deviation nor lengths as
    divisors.
    """

    kind: Literal["dr_grpo"] = "dr_grpo"
    """Selects Dr. GRPO."""
    aggregation: Aggregation = "constant"
