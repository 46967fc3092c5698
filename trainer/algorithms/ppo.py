"""PPO with a value head."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.algorithms.base import TokenAlgorithm


class Ppo(TokenAlgorithm):
    """PPO (arXiv:1707.06347, equations 7 and 11): clipped token ratios; a value head estimates the baseline.

    The value head reads the policy's last hidden state and does not train it.
    """

    kind: Literal["ppo"] = "ppo"
    """Selects PPO."""
    advantage: Literal["gae"] = "gae"
    """Generalized advantage estimation (arXiv:1506.02438, equation 16) over the policy's tokens of an episode, whose
    reward arrives at the last of them.
    """
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token. The paper's 0.99 is for control tasks; language models use 1 (arXiv:2009.01325)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Decay of the temporal differences: 1 is the whole return, 0 one step."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Distance from the starting value beyond which a value that moves further has no gradient (OpenAI baselines,
    ppo2). null: unclipped.
    """
    value_learning_rate: float = Field(default=1e-3, ge=0)
    """Learning rate of AdamW for the value head."""
