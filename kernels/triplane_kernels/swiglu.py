"""SwiGLU of a joined gate and up projection, alone or fused with the quantization of its result.

gate_up [P, 2F] = gate | up --> silu(gate) * up [P, F]     (Shazeer, arXiv:2002.05202)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triplane_kernels import swiglu_reference
from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.tuning import workload

SHAPES = [(rows, width) for rows in (4096, 32768, 131072) for width in (768, 2048, 4096)]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 (float64 for float64); silu(gate) is rounded to gate_up's dtype before the
    product, as engines do.

    gate_up: [P, 2F] float32, bfloat16 or float16: gate in the first F columns, up in the last. Returns [P, F] of the
    same dtype; differentiable.
    Raises KernelInputError for other shapes.
    """
    _check(gate_up)
    return _swiglu(gate_up.contiguous())


def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up [P, 2F], of its dtype, from the gradient [P, F] of `swiglu`'s result; it passes straight
    through the roundings.

    Raises KernelInputError.
    """
    _check(gate_up, gradient)
    return _swiglu_backward(gradient.contiguous(), gate_up.contiguous())


def swiglu_quantized(gate_up: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`quantize_activations` of `swiglu`, in one pass.

    gate_up: see `swiglu`. Returns codes [P, F] float8_e4m3fn and scales [P, ceil(F/128)] float32 (stride 1 along P).
    Codes have no gradient; `swiglu_backward` is the straight-through gradient. Raises KernelInputError.
    """
    _check(gate_up)
    return _swiglu_quantized(gate_up.detach().contiguous(), power_of_two)


def swiglu_backward_quantized(
    gradient: Tensor, gate_up: Tensor, *, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_backward` and, from its float32 values, its `quantize_activations`: operands of wgrad and of dgrad in one
    pass.

    Returns the gradient of gate_up [P, 2F] of its dtype, codes [P, 2F] float8_e4m3fn and scales [P, ceil(2F/128)]
    float32 (stride 1 along P). If F is no multiple of 128, one block of columns has both gate and up. Raises
    KernelInputError.
    """
    _check(gate_up, gradient)
    return _swiglu_backward_quantized(gradient.detach().contiguous(), gate_up.detach().contiguous(), power_of_two)


def _check(gate_up: Tensor, gradient: Tensor | None = None) -> None:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_floating_point():
        raise KernelInputError(f"swiglu: gate_up must be [P, 2F] of floats, not {gate_up.dtype} {list(gate_up.shape)}")
    wanted = (gate_up.shape[0], gate_up.shape[1] // 2)
    if gradient is not None and tuple(gradient.shape) != wanted:
        raise KernelInputError(f"swiglu: the gradient must be {list(wanted)}, not {list(gradient.shape)}")


def _way(op: str, *tensors: Tensor) -> ModuleType:
    if choose(op, *tensors) == "reference":
        return swiglu_reference
    from triplane_kernels import swiglu_triton

    return swiglu_triton


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradient(ctx: Any, gradient: Tensor) -> Tensor:
    return _swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


@operator("swiglu", fake=_fake, save=_save, backward=_gradient)
def _swiglu(gate_up: Tensor) -> Tensor:
    out: Tensor = _way("swiglu", gate_up).swiglu(gate_up)
    return out


def _backward_fake(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


@operator("swiglu_backward", fake=_backward_fake)
def _swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    out: Tensor = _way("swiglu_backward", gradient, gate_up).swiglu_backward(gradient, gate_up)
    return out


def _quantized_fake(gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty(rows, width, dtype=torch.float8_e4m3fn), _scales(gate_up, rows, width)


@operator("swiglu_quantized", fake=_quantized_fake)
def _swiglu_quantized(gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    codes, scales = _way("swiglu_quantized", gate_up).swiglu_quantized(gate_up, power_of_two)
    return codes, scales


def _backward_quantized_fake(gradient: Tensor, gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty_like(gate_up, dtype=torch.float8_e4m3fn)
    return torch.empty_like(gate_up), codes, _scales(gate_up, gate_up.shape[0], gate_up.shape[1])


@operator("swiglu_backward_quantized", fake=_backward_quantized_fake)
def _swiglu_backward_quantized(gradient: Tensor, gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    way = _way("swiglu_backward_quantized", gradient, gate_up)
    out, codes, scales = way.swiglu_backward_quantized(gradient, gate_up, power_of_two)
    return out, codes, scales


def _scales(like: Tensor, rows: int, columns: int) -> Tensor:
    """Empty scales [rows, ceil(columns/128)], stored column by column."""
    return like.new_empty(-(-columns // 128), rows, dtype=torch.float32).t()


@workload("swiglu", SHAPES)
def _tune_swiglu(rows: int, width: int) -> None:
    swiglu(_drawn(rows, 2 * width))


@workload("swiglu_backward", SHAPES)
def _tune_backward(rows: int, width: int) -> None:
    swiglu_backward(_drawn(rows, width), _drawn(rows, 2 * width))


@workload("swiglu_quantized", SHAPES)
def _tune_quantized(rows: int, width: int) -> None:
    swiglu_quantized(_drawn(rows, 2 * width))


@workload("swiglu_backward_quantized", SHAPES)
def _tune_backward_quantized(rows: int, width: int) -> None:
    swiglu_backward_quantized(_drawn(rows, width), _drawn(rows, 2 * width))


def _drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
