"""A layer's mixture of experts by the kernels of `triplane_kernels`."""

from __future__ import annotations

from torch import Tensor
from triplane_kernels.moe import Recipe, expert_mlp
from triplane_kernels.moe_weights import ExpertWeights
from triplane_kernels.permute import permute, unpermute


def kernel_mixture(
    rows: Tensor, shares: Tensor, chosen: Tensor, weights: ExpertWeights, products: Recipe = Recipe()
) -> Tensor:
    """See `trainer.recipes.base.Recipe.mixture`. products: those with FP8 operands."""
    permuted = permute(rows, chosen, len(weights.gate))
    return unpermute(expert_mlp(permuted.rows, weights, permuted.offsets, products), permuted, shares.float())
