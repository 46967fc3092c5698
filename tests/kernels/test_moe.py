"""The expert layer: right in float64, close in FP8, its codes the exported ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import DIFFERENCE, Way, cosine, difference, normal, relative_error
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise, quantize_blockwise
from triplane_kernels.errors import KernelInputError
from triplane_kernels.moe import BF16, Recipe, expert_layer, expert_mlp
from triplane_kernels.moe_reference import expert_layer_reference
from triplane_kernels.moe_weights import ExpertWeights

NAMES = ("hidden", "logits", "gate", "up", "down")
GRADIENT = 0.999
"""Smallest cosine of a gradient against that of bfloat16 math from the same forward pass."""


def inputs(
    tokens: int, hidden: int, width: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """hidden, logits, gate, up, down, each wanting a gradient."""
    made = [
        normal(tokens, hidden, seed=seed),
        normal(tokens, experts, seed=seed + 1),
        normal(experts, width, hidden, seed=seed + 2, spread=hidden**-0.5),
        normal(experts, width, hidden, seed=seed + 3, spread=hidden**-0.5),
        normal(experts, hidden, width, seed=seed + 4, spread=width**-0.5),
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def moved(tensors: list[Tensor], device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().to(device=device, dtype=dtype).requires_grad_() for tensor in tensors]


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    outer = normal(*out.shape, seed=99).to(out)
    return list(torch.autograd.grad(out, tensors, outer))


def run_layer(tensors: list[Tensor], weights: ExpertWeights, k: int, recipe: Recipe) -> tuple[Tensor, list[Tensor]]:
    out = expert_layer(tensors[0], tensors[1], weights, k, recipe=recipe)
    return out, gradients(out, tensors)


@pytest.mark.parametrize(("scores", "normalize"), [("softmax", True), ("softmax", False), ("sigmoid", True)])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(7, 5, 2), (1, 3, 3), (4, 6, 1)])
def test_without_fp8_the_layer_is_the_reference_in_float64(
    tokens: int, experts: int, k: int, scores: str, normalize: bool
) -> None:
    tensors = inputs(tokens, 12, 9, experts, dtype=torch.float64)
    weights = ExpertWeights.full(*tensors[2:], torch.float64)
    out = expert_layer(*tensors[:2], weights, k, recipe=BF16, scores=scores, normalize=normalize)  # type: ignore[arg-type]
    wanted = expert_layer_reference(*tensors, k, scores=scores, normalize=normalize)
    torch.testing.assert_close(out, wanted)
    for found, right in zip(gradients(out, tensors), gradients(wanted, tensors), strict=True):
        torch.testing.assert_close(found, right)


def test_gradients_are_those_of_finite_differences() -> None:
    tensors = inputs(2, 3, 2, 2, dtype=torch.float64)

    def layer(*tensors: Tensor) -> Tensor:
        return expert_layer(*tensors[:2], ExpertWeights.full(*tensors[2:], torch.float64), 2, recipe=BF16)

    def reference(*tensors: Tensor) -> Tensor:
        return expert_layer_reference(*tensors, 2)

    # the layer's own weights reach it detached, as codes do, so only what is not a weight moves with finite differences
    assert torch.autograd.gradcheck(lambda *some: layer(*some, *tensors[2:]), tensors[:2])
    assert torch.autograd.gradcheck(reference, tensors)


@pytest.mark.parametrize("way", ["reference", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_fp8_products_keep_the_layer_and_its_gradients(way: Way) -> None:
    tokens, hidden, width, experts, k = way.pick((96, 256, 136, 4, 2), (8192, 2048, 768, 128, 8))
    tensors = moved(inputs(tokens, hidden, width, experts), way.device, way.pick(torch.float32, torch.bfloat16))
    weights = ExpertWeights.quantize(*tensors[2:])
    forward_only, default, everywhere = Recipe(dgrad=False), Recipe(), Recipe(wgrad=True)
    runs = {recipe: run_layer(tensors, weights, k, recipe) for recipe in (BF16, forward_only, default, everywhere)}
    (twin, of_twin), (out, found) = runs[BF16], runs[default]
    # two FP8 products after each other
    assert difference(out, twin) < 2 * DIFFERENCE
    for name, gradient, wanted in zip(NAMES, found, of_twin, strict=True):
        assert gradient.dtype == wanted.dtype and cosine(gradient, wanted) > 0.9985, name
    for recipe in (default, everywhere):
        for name, gradient, wanted in zip(NAMES, runs[recipe][1], runs[forward_only][1], strict=True):
            assert cosine(gradient, wanted) >= GRADIENT, (recipe, name)


@pytest.mark.parametrize("way", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(BF16, marks=pytest.mark.slow, id="w8"), pytest.param(Recipe(wgrad=True), id="fp8")],
)
def test_kernels_and_reference_compute_the_same_layer(
    way: Way, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, hidden, width, experts, k = way.pick((32, 136, 72, 2, 2), (4096, 2048, 760, 64, 4))
    tensors = moved(inputs(tokens, hidden, width, experts), way.device)
    weights = ExpertWeights.quantize(*tensors[2:])
    out, found = run_layer(tensors, weights, k, recipe)
    monkeypatch.setenv("TRIPLANE_KERNELS", "reference")
    wanted, right = run_layer(tensors, weights, k, recipe)
    # A sum in another order may move a value across a rounding boundary of FP8: rarely, and by one step.
    assert relative_error(out, wanted) < 5e-3
    for name, gradient, other in zip(NAMES, found, right, strict=True):
        assert relative_error(gradient, other) < 1e-2, name


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 140), st.integers(1, 6), st.data())
@pytest.mark.slow
def test_every_shape_and_recipe_runs(tokens: int, hidden: int, width: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, experts))
    recipe = Recipe(*data.draw(st.tuples(*[st.booleans()] * 4)))
    tensors = inputs(tokens, hidden, width, experts)
    weights = ExpertWeights.quantize(*tensors[2:])
    out, found = run_layer(tensors, weights, k, recipe)
    values = [
        torch.stack([dequantize_blockwise(*pair) for pair in zip(*weights.codes()[name], strict=True)])
        for name in ("gate", "up", "down")
    ]
    leaves = [*tensors[:2], *(value.requires_grad_() for value in values)]
    wanted = expert_layer_reference(*leaves, k)
    assert relative_error(out, wanted) < 0.25
    for name, gradient, other in zip(NAMES, found, gradients(wanted, leaves), strict=True):
        assert gradient.shape == other.shape and bool(torch.isfinite(gradient).all()), name


def test_a_token_that_is_not_finite_stays_visible_and_alone(way: Way) -> None:
    tensors = moved(inputs(12, 128, 64, 2), way.device)
    weights = ExpertWeights.quantize(*tensors[2:])
    whole = expert_layer(*tensors[:2], weights, 1)
    with torch.no_grad():
        tensors[0][5, 7] = float("nan")
    broken = expert_layer(*tensors[:2], weights, 1)
    others = [token for token in range(12) if token != 5]
    assert bool(broken[5].isnan().all()) and torch.equal(broken[others], whole[others])


def test_experts_that_nobody_chose_get_a_gradient_of_zero(way: Way) -> None:
    tensors = moved(inputs(16, 128, 64, 3), way.device)
    with torch.no_grad():
        tensors[1][:, 2] = -1e9
    _, (*_, gate, up, down) = run_layer(tensors, ExpertWeights.quantize(*tensors[2:]), 1, Recipe(wgrad=True))
    for gradient in (gate, up, down):
        assert not gradient[2].any() and bool(gradient[0].any())


@pytest.mark.parametrize("width", [128, 130])
def test_the_exported_codes_are_those_that_were_computed_with(width: int) -> None:
    tensors = inputs(8, 192, width, 3)
    weights = ExpertWeights.quantize(*tensors[2:])
    before = expert_layer(*tensors[:2], weights, 2)
    for name, master in zip(("gate", "up", "down"), tensors[2:], strict=True):
        codes, scales = weights.codes()[name]  # type: ignore[index]
        for expert in range(3):
            wanted = quantize_blockwise(master[expert].detach())
            assert torch.equal(codes[expert].view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(scales[expert], wanted[1])
    again = ExpertWeights.from_codes(*(torch.zeros_like(master) for master in tensors[2:]), weights.codes())  # type: ignore[arg-type]
    assert torch.equal(expert_layer(*tensors[:2], again, 2), before)


def test_a_recipe_without_fp8_on_quantized_weights_computes_with_their_values() -> None:
    tensors = inputs(8, 192, 130, 3)
    weights = ExpertWeights.quantize(*tensors[2:])
    values = [
        torch.stack([dequantize_blockwise(*pair) for pair in zip(*weights.codes()[name], strict=True)])
        for name in ("gate", "up", "down")
    ]
    out = expert_layer(*tensors[:2], weights, 2, recipe=BF16)
    torch.testing.assert_close(out, expert_layer_reference(*tensors[:2], *values, 2))


@pytest.mark.parametrize("recipe", [Recipe(*flags) for flags in itertools.product([False, True], repeat=3)], ids=str)
def test_only_inputs_that_want_a_gradient_get_one(recipe: Recipe) -> None:
    tensors = [tensor.detach() for tensor in inputs(8, 128, 128, 3)]
    tensors[0].requires_grad_()
    weights = ExpertWeights.quantize(*tensors[2:])
    expert_layer(*tensors[:2], weights, 2, recipe=recipe).sum().backward()
    assert tensors[0].grad is not None and all(tensor.grad is None for tensor in tensors[1:])


def test_no_token_is_no_work(way: Way) -> None:
    tensors = moved(inputs(0, 128, 128, 3), way.device)
    out, found = run_layer(tensors, ExpertWeights.quantize(*tensors[2:]), 2, Recipe())
    assert out.shape == (0, 128) and not any(bool(gradient.any()) for gradient in found)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    hidden, logits, gate, up, down = (tensor.detach() for tensor in inputs(8, 128, 64, 3))
    weights = ExpertWeights.quantize(gate, up, down)
    with pytest.raises(KernelInputError, match="down"):
        ExpertWeights.quantize(gate, up, up)
    with pytest.raises(KernelInputError, match="gate needs float8_e4m3fn codes"):
        ExpertWeights.from_codes(gate, up, down, weights.codes() | {"gate": weights.codes()["down"]})  # type: ignore[arg-type]
    with pytest.raises(KernelInputError, match="logits must be"):
        expert_layer(hidden, logits[:, :2], weights, 2)
    with pytest.raises(KernelInputError, match="rows must be"):
        expert_mlp(hidden[:, :5], weights, torch.zeros(4, dtype=torch.int32))
    full = ExpertWeights.full(gate, up, down, torch.float32)
    with pytest.raises(KernelInputError, match="needs quantized weights"):
        expert_layer(hidden, logits, full, 2)
    with pytest.raises(KernelInputError, match="not quantized"):
        full.codes()
