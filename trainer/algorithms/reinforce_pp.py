"""REINFORCE++: PPO's loss without a critic."""

from __future__ import annotations

from typing import Literal

from trainer.algorithms.base import Advantage, RewardAdvantage, TokenAlgorithm


class ReinforcePlusPlus(RewardAdvantage, TokenAlgorithm):
    """REINFORCE++ (arXiv:2501.03262): PPO's clipped loss with globally normalized advantages: over all graded episodes
    of the iteration.

    `advantage: group_mean_batch_std` is its variant with a baseline. The paper's KL penalty in the reward is left out.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    """Selects REINFORCE++."""
    advantage: Advantage = "batch_normalized"
