"""The protocol between the training loops and what computes gradients and holds weights and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from trainer.data import ScoredSequence
from trainer.export import Exportable
from trainer.model import Batch, Scores
from trainer.ranks import Ranks
from trainer.state import NONE, OptimizerName, TrainerState

_T = TypeVar("_T", covariant=True)
_Value = TypeVar("_Value")

Microbatch = Sequence[ScoredSequence]
Read = Callable[[int, Batch, Scores], None]
"""Receives the number of a microbatch, its batch and the scores of it, which are on the CPU (`Scores.to_cpu`)."""
Loss = Callable[[int, Batch, Scores], Tensor]
"""Like `Read`; returns a microbatch's part of the loss of the whole batch: the parts of all ranks add up to it."""


class Future(Generic[_T]):
    """Result of a call. Calls take effect in the order in which they are made; `result` waits for this one.

    On a GPU a call returns before the device has finished. On a CPU it returns when the work is done.
    """

    def __init__(self, read: Callable[[], _T]) -> None:
        """read: waits and returns the value; called once."""
        self._read: Callable[[], _T] | None = read
        self._value: _T

    def result(self) -> _T:
        """The value. Raises what the work raised."""
        if self._read is not None:
            self._value, self._read = self._read(), None
        return self._value


def done(value: _Value) -> Future[_Value]:
    """Future of a call whose work is finished."""
    return Future(lambda: value)


@dataclass(frozen=True)
class AdamWRule:
    """AdamW for all weights."""

    beta1: float
    beta2: float
    weight_decay: float

    @property
    def name(self) -> OptimizerName:
        """Name in the trainer state."""
        return "adamw"


@dataclass(frozen=True)
class MuonRule:
    """Muon for the quantized matrices, AdamW for all other weights."""

    adamw_share: float
    """AdamW's learning rate as a multiple of that of `optim_step`."""
    muon_share: float = 1.0
    """Muon's."""

    @property
    def name(self) -> OptimizerName:
        """Name in the trainer state."""
        return "muon"


Rule = AdamWRule | MuonRule


class Backend(Protocol):
    """Weights, gradients and optimizer of one model, on all ranks of a job.

    Every rank makes the same calls in the same order; each passes its own microbatches, of which it may have none.
    Every call raises RanksLost if another rank ends or does not answer.
    """

    ranks: Ranks
    config: Mapping[str, Any]
    """Content of the checkpoint's config.json."""

    def forward(
        self, microbatches: Sequence[Microbatch], read: Read, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """Score microbatches without gradients, in order. temperature, routing: see `trainer.model.score`."""

    def clear_gradients(self) -> None:
        """Set all gradients to zero."""

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """Add the gradients of this rank's microbatches, in order."""

    def optim_step(self, learning_rate: float, max_norm: float) -> Future[float]:
        """Add up the gradients of all ranks, scale them down to the global norm `max_norm`, apply them once.

        Returns the norm before. If it is not finite the weights are unusable: the caller must stop.
        """

    def average_weights(self) -> Future[None]:
        """Take the present weights into their mean over the calls."""

    def use_average(self) -> Future[None]:
        """Replace the weights by that mean."""

    def get_weights(self) -> Future[Exportable]:
        """Weights for `trainer.export.publish_checkpoint`, on rank 0 complete."""

    def load_weights(self, masters: Mapping[str, Tensor]) -> Future[None]:
        """Replace the weights. masters: float32, one for each of `parameter_shapes`. The optimizer keeps its state."""

    def save(
        self,
        step: int,
        extra: dict[str, Any],
        replicated: Mapping[str, Tensor],
        *,
        optimizer: bool = True,
        loop: Mapping[str, Tensor] = NONE,
    ) -> Future[TrainerState]:
        """Trainer state for `trainer.state.publish_state`, on rank 0 complete. replicated: further tensors, equal on
        all ranks. optimizer: whether to include the state of the optimizer and of the mean. loop:
        tensors that no step changes, equal on all ranks.
        """

    def restore(self, state: TrainerState) -> Future[None]:
        """Replace the state of optimizer and mean by that of `state`, if it is of the same optimizer. The weights
        stay.
        """
