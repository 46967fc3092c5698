"""Registered kernels behave as torch's own operators."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from triplane_kernels.custom_ops import operator
from triplane_kernels.quantize import (
    dequantize_activations,
    dequantize_weights_into,
    quantize_activations,
    quantize_weights,
)


def _fake_scale(x: Tensor, factor: float, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.int32)


def _save_scale(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.factor, ctx.shifted = inputs[1], inputs[2] is not None


def _scale_backward(ctx: Any, gradient: Tensor, counted: None) -> tuple[Tensor, None, Tensor | None]:
    return gradient * ctx.factor, None, gradient if ctx.shifted else None


@operator("test_scale", fake=_fake_scale, save=_save_scale, backward=_scale_backward)
def scale(x: Tensor, factor: float, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scaled = x * factor if shift is None else x * factor + shift
    return scaled, (x > 0).sum(1, dtype=torch.int32)


@operator("test_round", fake=lambda x: torch.empty_like(x))
def round_up(x: Tensor) -> Tensor:
    return x.ceil()


@pytest.mark.parametrize(("shifted", "differentiated"), [(False, False), (True, True)])
def test_torch_finds_no_fault_in_a_registered_operator(shifted: bool, differentiated: bool) -> None:
    x = torch.randn(3, 4, requires_grad=differentiated)
    shift = torch.randn(3, 4, requires_grad=differentiated) if shifted else None
    torch.library.opcheck(scale, (x, 2.0, shift))


def test_the_gradient_reaches_every_input_that_wants_one() -> None:
    x, shift = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    scale(x, 2.0, shift=shift)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0)) and torch.equal(shift.grad, torch.ones(3, 4))


def test_a_gradient_that_does_not_exist_is_refused_and_never_zero() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="triplane::test_round has no gradient"):
        round_up(x).sum().backward()


def test_compiled_code_keeps_the_operator_whole() -> None:
    def work(x: Tensor) -> Tensor:
        return scale(x, 3.0)[0].sin()

    compiled = torch.compile(work, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        out = compiled(x)
        assert torch.equal(out, work(x))
        (found,) = torch.autograd.grad(out.sum(), x)
        (wanted,) = torch.autograd.grad(work(x).sum(), x)
        assert torch.equal(found, wanted)


def test_a_call_imports_no_compiler() -> None:
    program = (
        "import sys, torch, triplane_kernels.moe as moe\n"
        "from triplane_kernels.quantize import quantize_activations\n"
        "quantize_activations(torch.ones(2, 128))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_on_the_device_of_their_tensors(gpu: torch.device) -> None:
    x = torch.ones(2, 128, device="cuda:1")
    codes, scales = quantize_activations(x)
    assert codes.device == x.device and torch.equal(dequantize_activations(codes, scales), x)
    weights, out = torch.ones(1, 128, 128, device="cuda:1"), torch.zeros(1, 128, 128, device="cuda:1")
    dequantize_weights_into(out, *quantize_weights(weights))
    assert torch.equal(out, weights)
    assert torch.cuda.current_device() == 0
