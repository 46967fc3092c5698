"""RLOO, REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trainer.algorithms.base import Advantage, RewardAdvantage, SequenceAlgorithm, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class Rloo(RewardAdvantage, SequenceAlgorithm):
    """RLOO (arXiv:2402.14740, section 3.2): a whole sequence is one action.

    For the first step of an iteration the gradient is REINFORCE's. Later steps clip the sequence's probability ratio,
    as TRL's RLOOTrainer does.
    """

    kind: Literal["rloo"] = "rloo"
    """Selects RLOO."""
    advantage: Advantage = "leave_one_out"

    def log_ratio(self, tokens: Tokens) -> Tensor:
        """Log ratio of each token's whole sequence."""
        return self._summed(tokens)[tokens.owners]
