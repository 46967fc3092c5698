"""One matrix product in FP8 blocks or plain: out = a @ b^T, both operands along the sum.

forward  gemm(quantize_activations(x), quantize_weights(w))               x [M, K], w [N, K] -> [M, N]
dgrad    gemm(quantize_activations(grad), quantize_weights_both(w)[2:])   grad [M, N] -> [M, K]
wgrad    gemm(quantize_both(grad)[2:], quantize_both(x)[2:])              -> [N, K]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.operands import Operand, Operands
from triplane_kernels.quantize_reference import dequantize_rows, dequantize_weights
from triplane_kernels.tuning import workload


def gemm(a: Operand, b: Operand, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """out = a @ b^T.

    a: [M, K] bfloat16, float32 or float64; or codes [M, K] and scales [M, ceil(K/128)]. b: [N, K] of a's dtype; or
    codes [N, K] and scales [ceil(N/128), ceil(K/128)] (weights), or [N, ceil(K/128)] (rows scaled one by one, as
    wgrad's are). Returns [M, N] in out_dtype. Each 128-deep partial sum is promoted to float32 (DeepSeek-V3, section
    3.3.2). Plain operands carry gradients. Raises KernelInputError.
    """
    both = Operands.check("gemm", a, b)
    if both.a.dim() != 2 or both.b.dim() != 2 or both.a.shape[1] != both.b.shape[1]:
        raise KernelInputError(f"gemm: a {list(both.a.shape)} and b {list(both.b.shape)} must be [M, K] and [N, K]")
    if both.a_scales is not None and both.b_scales is not None:
        wide, (rows, columns) = -(-both.a.shape[1] // 128), (both.a.shape[0], both.b.shape[0])
        allowed = ((columns, wide), (-(-columns // 128), wide))
        if both.a_scales.shape != (rows, wide) or tuple(both.b_scales.shape) not in allowed:
            raise KernelInputError(
                f"gemm: scales {list(both.a_scales.shape)} and {list(both.b_scales.shape)} must be {[rows, wide]} and "
                f"{[-(-columns // 128), wide]} or {[columns, wide]}"
            )
    return _gemm(*both.flat, out_dtype)


def _reference(both: Operands, out_dtype: torch.dtype) -> Tensor:
    if both.a_scales is not None and both.b_scales is not None:
        dequantize = dequantize_rows if both.b_scales.shape[0] == both.b.shape[0] else dequantize_weights
        left, right = (
            dequantize_rows(both.a, both.a_scales, torch.float32),
            dequantize(both.b, both.b_scales, torch.float32),
        )
    else:
        left, right = (part if part.dtype == torch.float64 else part.float() for part in (both.a, both.b))
    return (left @ right.t()).to(out_dtype)


def _fake(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    gradient = gradient.to(a.dtype)
    of_a = _gemm(gradient, None, b.t(), None, a.dtype) if ctx.needs_input_grad[0] else None
    of_b = _gemm(gradient.t(), None, a.t(), None, b.dtype) if ctx.needs_input_grad[2] else None
    return of_a, None, of_b, None, None


@operator("gemm", fake=_fake, save=_save, backward=_backward)
def _gemm(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    both = Operands(a, a_scales, b, b_scales)
    if choose("gemm", *both.tensors) == "reference":
        return _reference(both, out_dtype)
    from triplane_kernels import grouped_gemm_triton

    return grouped_gemm_triton.gemm(both, out_dtype)


@workload("gemm", [(8192, 8192, 8192), (4096, 7168, 2048), (32768, 2048, 4096)])
def _tune(rows: int, columns: int, depth: int) -> None:
    from triplane_kernels.quantize import quantize_activations, quantize_weights

    a, b = (torch.randn(size, depth, device="cuda", dtype=torch.bfloat16) for size in (rows, columns))
    gemm(a, b)
    gemm(quantize_activations(a), quantize_weights(b))
