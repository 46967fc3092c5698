"""What all algorithms share: their fields, the tokens that they see, and the objective that they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.algorithms.surrogates import clipped_surrogate, sequence_sum
from trainer.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

Advantage = Literal["group_mean", "group_mean_std", "leave_one_out", "batch_normalized", "group_mean_batch_std"]
"""How rewards become advantages; see `trainer.algorithms.advantages`."""
Aggregation = Literal["token", "sequence", "constant"]
"""How token losses become one number; see `TokenAlgorithm`."""


@dataclass(frozen=True)
class Tokens:
    """The scored tokens of a microbatch of whole sequences. float32 [tokens] unless stated."""

    logprobs: Tensor
    """Log probabilities under the weights in training; carries the gradient."""
    old: Tensor
    """Log probabilities under the iteration's starting weights."""
    sampler: Tensor
    """Log probabilities that the sampler recorded."""
    advantages: Tensor
    owners: Tensor
    """int64 [tokens]: sequence of each token."""
    lengths: Tensor
    """float32 [sequences]: scored tokens of each sequence, at least 1."""


@dataclass(frozen=True)
class Objective:
    """What the policy maximizes, by token."""

    values: Tensor
    """float32 [tokens]; carries the gradient."""
    clipped: Tensor
    """bool [tokens]: the clipped term is the smaller one."""
    dual_clipped: Tensor
    """bool [tokens]: negative advantage and a ratio above `dual_clip`; no gradient."""


class RewardAdvantage(Settings):
    """Advantages that are functions of the rewards alone."""

    advantage: Advantage = "group_mean"
    """Reward minus its group's mean (group_mean); also divided by the group's standard deviation (group_mean_std);
    minus the mean of the group's other members (leave_one_out); normalized by mean and standard deviation of all
    members (batch_normalized); minus its group's mean, divided by the standard deviation of all such differences
    (group_mean_batch_std).
    """


class ClippedAlgorithm(Settings):
    """Base class: PPO's clipped surrogate (arXiv:1707.06347, equation 7) of each token's probability ratio."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The probability ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the probability ratio for negative advantages (arXiv:1912.09729, equation 3); tokens beyond it have no
    gradient. null: unbounded.
    """

    def log_ratio(self, tokens: Tokens) -> Tensor:
        """Unbounded logarithm of the ratio that `objective` takes, float32 [tokens]."""
        return tokens.logprobs - tokens.old

    def objective(self, tokens: Tokens, ratio: Tensor) -> Objective:
        """Objective to maximize. ratio: exp of the bounded `log_ratio`."""
        return Objective(*clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip))


class TokenAlgorithm(ClippedAlgorithm):
    """Base class of algorithms with one term for each token."""

    aggregation: Aggregation = "token"
    """Of the token losses of an optimizer step. token: mean over all tokens. sequence: mean over each sequence, then
    over the sequences. constant: sum over each sequence divided by `aggregation_length`, then mean over the sequences.
    """
    aggregation_length: int | None = Field(default=None, ge=1)
    """Tokens by which `aggregation: constant` divides. null: the model's longest context."""

    @model_validator(mode="after")
    def _length_is_used(self) -> Self:
        if self.aggregation_length is not None and self.aggregation != "constant":
            raise ValueError(
                f"aggregation_length={self.aggregation_length}: only aggregation constant divides by it, not"
                f" {self.aggregation}: set it to null, or aggregation to constant"
            )
        return self

    def divisor(self, tokens: int, sequences: int, longest: int) -> int:
        """Number by which the sum of `PolicyLoss.loss` over an optimizer step is divided.

        tokens, sequences: of the whole step, dropped ones included. longest: the model's longest context.
        """
        if self.aggregation == "token":
            return tokens
        return sequences if self.aggregation == "sequence" else sequences * (self.aggregation_length or longest)


class SequenceAlgorithm(ClippedAlgorithm):
    """Base class of algorithms with one ratio, and so one term, for each sequence."""

    aggregation: Literal["sequence"] = "sequence"
    """Mean of the sequences' terms."""

    @field_validator("aggregation", mode="before")
    @classmethod
    def _whole_sequences(cls, value: Any) -> Any:
        if value in ("token", "constant"):
            raise ValueError(
                f"{cls.model_fields['kind'].default} has one term for each sequence, which aggregation {value} would"
                " weigh by the sequence's length: use sequence"
            )
        return value

    def divisor(self, tokens: int, sequences: int, longest: int) -> int:
        """Number of sequences of the optimizer step."""
        return sequences

    def _summed(self, tokens: Tokens) -> Tensor:
        """Log ratio of each whole sequence, float32 [sequences]."""
        return sequence_sum(tokens.logprobs - tokens.old, tokens.owners, len(tokens.lengths))
