"""CISPO: clipped importance weights instead of clipped updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.base import Advantage, Objective, RewardAdvantage, TokenAlgorithm, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class Cispo(RewardAdvantage, TokenAlgorithm):
    """CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5): clip(r) A log p, without gradient through clip(r).

    The paper sets no lower bound and does not publish the upper one; 1 + clip_high = 5 is in the range of
    arXiv:2510.13786.
    """

    kind: Literal["cispo"] = "cispo"
    """Selects CISPO."""
    advantage: Advantage = "group_mean_std"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    clip_high: float = Field(default=4.0, ge=0)

    @model_validator(mode="after")
    def _no_dual_clip(self) -> Self:
        if self.dual_clip is not None:
            raise ValueError("cispo bounds the ratio of both signs by clip_high: set dual_clip to null")
        return self

    def objective(self, tokens: Tokens, ratio: Tensor) -> Objective:
        """Objective to maximize; every token keeps a gradient."""
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high).detach()
        outside = weight != ratio.detach()
        return Objective(weight * tokens.advantages * tokens.logprobs, outside, outside & False)
