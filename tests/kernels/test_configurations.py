"""On a GPU: every launch configuration that a search may choose gives the reference's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from kernel_inputs import first_that_fits, generator, normal, offsets_of, relative_error
from torch import Tensor
from triplane_kernels import tuning
from triplane_kernels.gemm import gemm
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.loss_head import loss_head
from triplane_kernels.norm import rms_norm
from triplane_kernels.permute import permute, unpermute
from triplane_kernels.quantize import (
    dequantize_weights_into,
    quantize_activations,
    quantize_both,
    quantize_mx,
    quantize_weights_both,
)
from triplane_kernels.router import route
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized
from triplane_kernels.tuning import Config, Results

pytestmark = pytest.mark.gpu
ROWS, WIDTH, DEPTH, GROUPS = 2048, 768, 1024, 8
NEAR = 0.01
"""Largest relative error, and largest share of unequal codes: sums in another order change single ones."""
Case = Callable[[torch.device], object]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def drawn(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return normal(*shape, seed=seed).to(device, dtype)


def offsets(device: torch.device) -> Tensor:
    """Groups of unequal sizes, one of them empty."""
    return offsets_of((128, 0, 512, 128, 256, 384, 512, 128), device)


@case
def rows(device: torch.device) -> object:
    return quantize_activations(drawn(device, ROWS, DEPTH)), quantize_activations(
        drawn(device, ROWS, DEPTH, dtype=torch.float32)
    )


@case
def both(device: torch.device) -> object:
    return [quantize_both(drawn(device, ROWS, DEPTH, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]


@case
def weights(device: torch.device) -> object:
    values = drawn(device, GROUPS, WIDTH, DEPTH, dtype=torch.float32)
    found = [quantize_weights_both(values.to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    again = torch.empty_like(values)
    dequantize_weights_into(again, *found[1][:2])
    return found, again


@case
def mx(device: torch.device) -> object:
    return quantize_mx(drawn(device, ROWS, DEPTH))


@case
def products_of_codes(device: torch.device) -> object:
    a, grad = drawn(device, ROWS, DEPTH), drawn(device, ROWS, WIDTH, seed=1)
    codes, scales, codes_t, scales_t = quantize_weights_both(drawn(device, GROUPS, WIDTH, DEPTH, seed=2))
    return (
        grouped_gemm(quantize_activations(a), (codes, scales), offsets(device)),
        grouped_gemm_dgrad(quantize_activations(grad), (codes_t, scales_t), offsets(device), transposed=True),
        grouped_gemm_wgrad(quantize_both(grad)[2:], quantize_both(a)[2:], offsets(device)),
        gemm(quantize_activations(a), (codes[0], scales[0])),
    )


@case
def plain_products(device: torch.device) -> object:
    a, grad = drawn(device, ROWS, DEPTH), drawn(device, ROWS, WIDTH, seed=1)
    b = drawn(device, GROUPS, WIDTH, DEPTH, seed=2)
    return (
        grouped_gemm(a, b, offsets(device)),
        grouped_gemm_dgrad(grad, b, offsets(device)),
        grouped_gemm_wgrad(grad, a, offsets(device)),
    )


@case
def permutation(device: torch.device) -> object:
    x = drawn(device, ROWS, DEPTH).requires_grad_()
    experts = torch.rand(ROWS, 128, generator=generator(1)).topk(8).indices.to(device)
    shares = torch.rand(ROWS, 8, generator=generator(2)).to(device).requires_grad_()
    permuted = permute(x, experts, 128)
    found = unpermute(permuted.rows, permuted, shares)
    return found, torch.autograd.grad(found.float().square().sum(), (x, shares))


@case
def routing(device: torch.device) -> object:
    logits = drawn(device, ROWS, 128, dtype=torch.float32).requires_grad_()
    shares, chosen = route(logits, 8)
    return shares, chosen, torch.autograd.grad(shares.square().sum(), logits)


@case
def activation(device: torch.device) -> object:
    gate_up, gradient = drawn(device, ROWS, 2 * WIDTH), drawn(device, ROWS, WIDTH, seed=1)
    return (
        swiglu(gate_up),
        swiglu_backward(gradient, gate_up),
        swiglu_quantized(gate_up),
        swiglu_backward_quantized(gradient, gate_up),
    )


@case
def norms(device: torch.device) -> object:
    weight = (1 + 0.1 * drawn(device, DEPTH, seed=1)).requires_grad_()
    x, angles = (
        drawn(device, ROWS, DEPTH).requires_grad_(),
        drawn(device, ROWS // 4, 1, DEPTH, seed=2, dtype=torch.float32),
    )
    found = [
        rms_norm(x, weight, 1e-6),
        rms_norm(x.view(ROWS // 4, 4, DEPTH), weight, 1e-6, (angles.cos(), angles.sin())),
    ]
    return found, [torch.autograd.grad(each.float().square().sum(), (x, weight)) for each in found]


@case
def head(device: torch.device) -> object:
    hidden = drawn(device, ROWS, DEPTH).requires_grad_()
    weight = (drawn(device, 6000, DEPTH, seed=1) * DEPTH**-0.5).requires_grad_()
    targets = torch.randint(6000, (ROWS,), generator=generator(2)).to(device)
    logprobs, entropy = loss_head(hidden, weight, targets)
    return logprobs, entropy, torch.autograd.grad(logprobs.mean(), (hidden, weight))


def tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found.detach()
    else:
        for each in found:
            yield from tensors(each)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Share of unequal elements for codes and indices, else the relative error."""
    assert found.shape == wanted.shape
    if not found.is_floating_point() or found.element_size() == 1:
        return float((found.float() != wanted.float()).float().mean())
    return relative_error(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_every_configuration_gives_the_references_results(
    gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_KERNELS", "reference")
    wanted = list(tensors(CASES[name](gpu)))
    monkeypatch.setenv("TRIPLANE_KERNELS", "triton")
    most, number, used, wrong = 1, 0, {}, []

    def numbered(op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
        nonlocal most
        most = max(most, len(candidates))
        first = number % len(candidates)
        used[op] = first_that_fits(op, [*candidates[first:], *candidates[:first]], run)
        return dict(used[op])

    monkeypatch.setattr(tuning, "search", numbered)
    while number < most:
        tuning._remembered.clear()
        used.clear()
        found = list(tensors(CASES[name](gpu)))
        off = [round(distance(*pair), 6) for pair in zip(found, wanted, strict=True)]
        if not all(each <= NEAR for each in off):  # NaN is wrong
            wrong.append(f"{used}: {off}")
        number += 1
    assert not wrong, "\n".join(wrong)
