"""Recipe `bf16`: weights, activations and results of products in bfloat16, sums in float32, by explicit casts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from triplane_kernels.machine import choose
from triplane_kernels.moe import BF16
from triplane_kernels.moe_weights import ExpertWeights

from trainer.recipes.base import Experts, Recipe
from trainer.recipes.mixture import kernel_mixture


class Bf16Recipe(Recipe):
    """On a GPU products read bfloat16 tensors and sum in float32. On a CPU they are float64 products of the same
    operands, rounded once: the same numbers up to the rounding of sums.
    """

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See Recipe.linear."""
        if rows.is_cuda:
            return F.linear(rows, weight.to(torch.bfloat16))
        return super().linear(rows, weight)

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """See Recipe.grouped."""
        if rows.is_cuda:
            return F.grouped_mm(rows, weights.to(torch.bfloat16).mT, offs=ends)
        return super().grouped(rows, weights, ends)

    def mixture(self, rows: Tensor, shares: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """See Recipe.mixture. The kernels take two thirds of the time of torch's grouped products (docs/kernels.md)."""
        if not rows.is_cuda or choose("grouped_gemm", rows) == "reference":
            return super().mixture(rows, shares, chosen, experts)
        weights = ExpertWeights.full(experts.gate, experts.up, experts.down, torch.bfloat16)
        return kernel_mixture(rows, shares, chosen, weights, BF16)
