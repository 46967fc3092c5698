"""Optimizers over whole buffers: Muon for the quantized matrices of a warm start, AdamW for everything else.

`state()` and `load()` use tensors by parameter name, so that the state can be stored as safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.parameters import PLAIN, Buffer, Parameters

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer(Protocol):
    """Protocol: applies the gradients in `Parameters` to its masters."""

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` continues exactly."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""


class AdamW:
    """AdamW (arXiv:1711.05101, algorithm 2) over the masters of `buffers`.

    Not `torch.optim.AdamW`: its first step imports torch's compiler, which takes one second of CPU time in a process of
    four.
    """

    def __init__(self, buffers: Sequence[Buffer], beta1: float, beta2: float, weight_decay: float = 0.0) -> None:
        self._buffers = list(buffers)
        self._betas, self._decay, self._epsilon = (beta1, beta2), weight_decay, 1e-8
        self._taken = 0
        self._means = [torch.zeros_like(buffer.master) for buffer in self._buffers]
        self._squares = [torch.zeros_like(buffer.master) for buffer in self._buffers]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""
        self._taken += 1
        if self._buffers[0].master.is_cuda:
            self._fused_step(learning_rate)
            return
        beta1, beta2 = self._betas
        first, second = 1 - beta1**self._taken, 1 - beta2**self._taken
        for buffer, mean, square in zip(self._buffers, self._means, self._squares, strict=True):
            mean.lerp_(buffer.gradient, 1 - beta1)
            square.mul_(beta2).addcmul_(buffer.gradient, buffer.gradient, value=1 - beta2)
            scale = square.div(second).sqrt_().add_(self._epsilon)
            buffer.master.mul_(1 - learning_rate * self._decay)
            buffer.master.addcdiv_(mean, scale, value=-learning_rate / first)

    def _fused_step(self, learning_rate: float) -> None:
        """The same step in one pass over memory, without temporary tensors. Rounds otherwise than `step` on a CPU."""
        masters, gradients = zip(*((buffer.master, buffer.gradient) for buffer in self._buffers), strict=True)
        taken = torch.full((), float(self._taken), device=masters[0].device)
        torch._fused_adamw_(
            list(masters),
            list(gradients),
            self._means,
            self._squares,
            [],
            [taken] * len(masters),
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._decay,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """`adamw.step` and, for each parameter, `adamw.exp_avg.<name>` and `adamw.exp_avg_sq.<name>`."""
        found: dict[str, Tensor] = {"adamw.step": torch.tensor(float(self._taken))}
        for buffer, mean, square in zip(self._buffers, self._means, self._squares, strict=True):
            found |= {f"adamw.exp_avg.{name}": buffer.view(mean, name) for name in buffer.spans}
            found |= {f"adamw.exp_avg_sq.{name}": buffer.view(square, name) for name in buffer.spans}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._taken = int(state["adamw.step"])
        for buffer, mean, square in zip(self._buffers, self._means, self._squares, strict=True):
            for name in buffer.spans:
                buffer.view(mean, name).copy_(state[f"adamw.exp_avg.{name}"])
                buffer.view(square, name).copy_(state[f"adamw.exp_avg_sq.{name}"])


class Muon:
    """Muon: momentum, orthogonalized per matrix.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers" (2024).

    Each expert is a separate matrix; matrices of equal shape are orthogonalized in one batch.
    """

    def __init__(self, buffers: Sequence[Buffer], momentum: float = 0.95) -> None:
        self._buffers = list(buffers)
        self._decay = momentum
        self._momenta = [torch.zeros_like(buffer.master) for buffer in self._buffers]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients once, with Nesterov momentum."""
        for buffer, momentum in zip(self._buffers, self._momenta, strict=True):
            momentum.lerp_(buffer.gradient, 1 - self._decay)
            update = orthogonalize(buffer.gradient.lerp(momentum, self._decay))
            rows, columns = update.shape[-2:]
            buffer.master.sub_(update, alpha=learning_rate * max(1.0, rows / columns) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        """`muon.momentum.<name>` for each parameter."""
        return {
            f"muon.momentum.{name}": buffer.view(momentum, name)
            for buffer, momentum in zip(self._buffers, self._momenta, strict=True)
            for name in buffer.spans
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for buffer, momentum in zip(self._buffers, self._momenta, strict=True):
            for name in buffer.spans:
                buffer.view(momentum, name).copy_(state[f"muon.momentum.{name}"])


class MuonWithAdamW:
    """Muon for the quantized matrices, AdamW for embeddings, norms and routers."""

    def __init__(self, parameters: Parameters, adamw_share: float, muon_share: float = 1.0) -> None:
        """adamw_share, muon_share: learning rates as multiples of the one given to `step`."""
        self._adamw_share, self._muon_share = adamw_share, muon_share
        self._muon = Muon([buffer for buffer in parameters.buffers if buffer.name != PLAIN])
        self._adamw = AdamW([buffer for buffer in parameters.buffers if buffer.name == PLAIN], 0.9, 0.95)

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""
        self._muon.step(learning_rate * self._muon_share)
        self._adamw.step(learning_rate * self._adamw_share)

    def state(self) -> dict[str, Tensor]:
        """Tensors of both optimizers."""
        return self._muon.state() | self._adamw.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._muon.load(state)
        self._adamw.load(state)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately nearest (semi-)orthogonal matrices: singular values become about 1. Quintic Newton-Schulz
    iteration.

    matrices: [count, rows, columns] float32. Runs in bfloat16 where the CPU multiplies it natively (2.7 times faster),
    as Muon does on GPUs.
    """
    a, b, c = NEWTON_SCHULZ
    native = matrices.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16 if native else torch.float32)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()
