"""The expert layer as a torch module with masters and router, for torch.compile, FSDP2 and models of modules."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from triplane_kernels.moe import Recipe, expert_layer
from triplane_kernels.moe_weights import ExpertWeights


class ExpertLayer(nn.Module):
    """hidden [..., H] to [..., H] through k of E experts of width F; the caller adds the residual.

    Parameters, by the names of a Qwen3-MoE checkpoint's stacked experts: `router` [E, H], `gate_proj` and `up_proj` [E,
    F, H], `down_proj` [E, H, F], in `dtype`. Under FSDP2 they are sharded by experts; every rank quantizes the gathered
    weights, so all ranks have the same codes.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        experts: int,
        k: int,
        *,
        scores: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        recipe: Recipe = Recipe(),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.k, self.recipe, self.normalize = k, recipe, normalize
        self.scores: Literal["softmax", "sigmoid"] = scores

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5)

        self.router = drawn(experts, hidden)
        self.gate_proj, self.up_proj = drawn(experts, width, hidden), drawn(experts, width, hidden)
        self.down_proj = drawn(experts, hidden, width)

    def quantized(self) -> ExpertWeights:
        """Quantized current weights.

        Call this once per optimizer step and pass the result to every `forward` until the next; export its codes.
        """
        return ExpertWeights.quantize(self.gate_proj, self.up_proj, self.down_proj)

    def forward(self, hidden: Tensor, weights: ExpertWeights | None = None) -> Tensor:
        """weights: from `quantized`; None: quantize the masters again, in one pass over them."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = nn.functional.linear(flat, self.router.to(flat.dtype))
        out = expert_layer(
            flat,
            logits,
            weights or self.quantized(),
            self.k,
            scores=self.scores,
            normalize=self.normalize,
            recipe=self.recipe,
        )
        return out if hidden.dim() == 2 else out.view(hidden.shape)
