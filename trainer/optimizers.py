"""Optimizers over whole buffers: Muon for the quantized matrices of a warm start, AdamW for everything else.

Both keep their state per parameter name in `state()` and `load()`, so that it survives as plain tensors in safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.parameters import PLAIN, Buffer, Parameters

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Optimizer(Protocol):
    """Applies the gradients in `Parameters` to its masters."""

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` goes on exactly."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""


class AdamW:
    """AdamW (arXiv:1711.05101) over the masters of `buffers`."""

    def __init__(self, buffers: Sequence[Buffer], beta1: float, beta2: float, weight_decay: float = 0.0) -> None:
        self._buffers = list(buffers)
        self._handles = [buffer.master.detach().requires_grad_() for buffer in self._buffers]
        for handle, buffer in zip(self._handles, self._buffers, strict=True):
            handle.grad = buffer.gradient
        self._adamw = torch.optim.AdamW(
            self._handles, lr=0.0, betas=(beta1, beta2), eps=1e-8, weight_decay=weight_decay, fused=True
        )
        for handle in self._handles:
            self._adamw.state[handle] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(handle),
                "exp_avg_sq": torch.zeros_like(handle),
            }

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()

    def state(self) -> dict[str, Tensor]:
        """`adamw.step` and, for each parameter, `adamw.exp_avg.<name>` and `adamw.exp_avg_sq.<name>`."""
        found: dict[str, Tensor] = {"adamw.step": self._adamw.state[self._handles[0]]["step"]}
        for handle, buffer in zip(self._handles, self._buffers, strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                found |= {
                    f"adamw.{moment}.{name}": buffer.view(self._adamw.state[handle][moment], name)
                    for name in buffer.spans
                }
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        for handle, buffer in zip(self._handles, self._buffers, strict=True):
            slot = self._adamw.state[handle]
            slot["step"].copy_(state["adamw.step"])
            for moment in ("exp_avg", "exp_avg_sq"):
                for name in buffer.spans:
                    buffer.view(slot[moment], name).copy_(state[f"adamw.{moment}.{name}"])


class Muon:
    """Muon: momentum, orthogonalized per matrix. Source: Keller Jordan et al., "Muon: An optimizer for hidden layers" (2024).

    One expert is one matrix; matrices of equal shape are orthogonalized in one batch.
    """

    def __init__(self, buffers: Sequence[Buffer], momentum: float = 0.95) -> None:
        self._buffers = list(buffers)
        self._decay = momentum
        self._momenta = [torch.zeros_like(buffer.master) for buffer in self._buffers]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients once, with Nesterov's look ahead."""
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
        """Take over what `state` gave."""
        for buffer, momentum in zip(self._buffers, self._momenta, strict=True):
            for name in buffer.spans:
                buffer.view(momentum, name).copy_(state[f"muon.momentum.{name}"])


class MuonWithAdamW:
    """Muon for the quantized matrices, AdamW for embeddings, norms and routers."""

    def __init__(self, parameters: Parameters, adamw_share: float) -> None:
        """adamw_share: AdamW's learning rate as a multiple of the one given to `step`."""
        self._share = adamw_share
        self._muon = Muon([buffer for buffer in parameters.buffers if buffer.name != PLAIN])
        self._adamw = AdamW([buffer for buffer in parameters.buffers if buffer.name == PLAIN], 0.9, 0.95)

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once."""
        self._muon.step(learning_rate)
        self._adamw.step(learning_rate * self._share)

    def state(self) -> dict[str, Tensor]:
        """Both optimizers' tensors."""
        return self._muon.state() | self._adamw.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave."""
        self._muon.load(state)
        self._adamw.load(state)


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearest (semi-)orthogonal matrices, roughly: singular values land near 1. Quintic Newton-Schulz iteration.

    matrices: [count, rows, columns] float32. Runs in bfloat16 where the CPU multiplies it natively (2.7 times faster), as Muon does on GPUs.
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
