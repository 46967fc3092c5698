"""PPO's value head: a linear function of the policy's last hidden state. It never reaches the exported checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.algorithms.ppo import Ppo
from trainer.optimizers import AdamW
from trainer.parameters import Buffer

PREFIX = "critic."
"""Of the value head's tensors in the trainer state: `critic.weight`, `critic.bias` and `critic.adamw.*`."""


class Critic:
    """The value head with its optimizer.

    A fresh one has weights 0, so that its first values are 0: this needs no seed, since a linear head learns from
    there.
    """

    def __init__(
        self, algorithm: Ppo, hidden_size: int, beta1: float, beta2: float, saved: Mapping[str, Tensor]
    ) -> None:
        """saved: tensors of a trainer state; without the value head's the critic is fresh."""
        master = torch.zeros(hidden_size + 1)
        spans: dict[str, tuple[int, int, tuple[int, ...]]]
        spans = {"weight": (0, hidden_size, (hidden_size,)), "bias": (hidden_size, hidden_size + 1, (1,))}
        self._buffer = Buffer("critic", master, master, torch.zeros_like(master), spans)
        self._optimizer = AdamW([self._buffer], beta1, beta2)
        self._rate = algorithm.value_learning_rate
        own = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items() if name.startswith(PREFIX)}
        if own:
            for name in spans:
                self._buffer.view(master, name).copy_(own[name])
            self._optimizer.load(own)
        self._leaf = master.detach().requires_grad_()
        self._leaf.grad = self._buffer.gradient

    def values(self, hidden: Tensor) -> Tensor:
        """float32 [tokens]: value of the state from which each token is predicted. hidden: [tokens, hidden_size].

        The gradient reaches the value head only, which is on the CPU.
        """
        return hidden.detach().to(self._leaf.device) @ self._leaf[:-1] + self._leaf[-1]

    @property
    def gradient(self) -> Tensor:
        """float32 [hidden_size + 1]."""
        return self._buffer.gradient

    def clear_gradients(self) -> None:
        """Set the gradient to zero, in place."""
        self.gradient.zero_()

    def step(self) -> None:
        """Apply the gradient once."""
        self._optimizer.step(self._rate)

    def state(self) -> dict[str, Tensor]:
        """Tensors from which a later iteration continues exactly."""
        weights = {name: self._buffer.view(self._buffer.master, name) for name in self._buffer.spans}
        return {f"{PREFIX}{name}": tensor for name, tensor in (weights | self._optimizer.state()).items()}
