"""GSPO, group sequence policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer.algorithms.base import Advantage, RewardAdvantage, SequenceAlgorithm, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(RewardAdvantage, SequenceAlgorithm):
    """GSPO (arXiv:2507.18071, equations 5 to 7): clips the geometric mean of each sequence's token ratios."""

    kind: Literal["gspo"] = "gspo"
    """Selects GSPO."""
    advantage: Advantage = "group_mean_std"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    clip_high: float = Field(default=4e-4, ge=0)

    def log_ratio(self, tokens: Tokens) -> Tensor:
        """Mean log ratio of each token's sequence (equation 7)."""
        return (self._summed(tokens) / tokens.lengths)[tokens.owners]
