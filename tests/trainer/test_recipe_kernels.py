"""What a GPU computes by kernels, and a CPU in plain torch, is the same: checked by the kernels' references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triplane_kernels.moe import BF16
from triplane_kernels.moe_weights import ExpertWeights
from triplane_kernels.norm import rms_norm

from contracts.precision import Forward
from trainer import model
from trainer.recipes.base import Experts, Recipe
from trainer.recipes.bf16 import Bf16Recipe
from trainer.recipes.mixture import kernel_mixture

EPS = 1e-6
RECIPES = {
    "float32": (Recipe(Forward()), 1e-5),
    # few values lie so near the middle of two bfloat16 numbers that the order of sums decides between them
    "bfloat16": (Bf16Recipe(Forward(activations="bfloat16")), 5e-4),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", RECIPES)
def test_norms_and_rotated_heads(name: str) -> None:
    recipe, bound = RECIPES[name]
    states, weight = recipe.narrow(3 * drawn(20, 4, 16, seed=1)), recipe.narrow(1 + 0.1 * drawn(16, seed=2)).float()
    angles = drawn(20, 1, 8, seed=3).repeat(1, 1, 2)
    rotary = angles.cos(), angles.sin()
    for of in (weight, None):
        found = model._rotate(recipe, states, of, EPS, rotary)
        assert found.dtype == states.dtype
        assert distance(found, rms_norm(states, of, EPS, rotary)) < bound
    assert distance(model._norm(recipe, states[:, 0], weight, EPS), rms_norm(states[:, 0], weight, EPS)) < bound


@pytest.mark.parametrize("name", RECIPES)
def test_a_mixture_and_its_gradients(name: str) -> None:
    recipe, bound = RECIPES[name]
    rows = recipe.narrow(drawn(50, 128, seed=1)).requires_grad_()
    shares, chosen = drawn(50, 4, seed=2).softmax(-1).topk(2, -1)
    shares = shares.detach().requires_grad_()
    shapes = (4, 128, 128), (4, 128, 128), (4, 128, 128)
    # leaves hold numbers of the recipe's weights
    leaves = [
        recipe.narrow(drawn(*shape, seed=3 + index) / 11).float().requires_grad_() for index, shape in enumerate(shapes)
    ]
    gradient = recipe.narrow(drawn(50, 128, seed=9))
    weights = ExpertWeights.full(*leaves, recipe.activations)
    results = [
        (out, *torch.autograd.grad(out, (rows, shares, *leaves), gradient))
        for out in (
            recipe.mixture(rows, shares, chosen, Experts(*leaves)),
            kernel_mixture(rows, shares, chosen, weights, BF16),
        )
    ]
    names = ("mixture", "rows", "shares", "gate", "up", "down")
    for name_of, plain, by_kernels in zip(names, *results, strict=True):
        assert by_kernels.dtype == plain.dtype
        # these two gradients autograd rounds more often than the kernels do; all else is rounded alike
        assert distance(by_kernels, plain) < (12 * bound if name_of in ("rows", "gate") else bound), name_of
