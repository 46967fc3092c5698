"""Matrix products of an expert layer: rows sorted by expert, one matrix per expert, in FP8 blocks or plain.

    forward  out[m] = b[g] @ a[m]          [M, K] x [G, N, K] -> [M, N]
    dgrad    out[m] = b[g]^T @ grad[m]     [M, N] x [G, N, K] -> [M, K]
    wgrad    out[g] = sum of grad[m] a[m]^T  [M, N] x [M, K] -> [G, N, K]

Each product accepts FP8 codes with scales or plain tensors independently. FP8 products promote each 128-deep partial
sum to float32 before they scale and add it (DeepSeek-V3, section 3.3.2, arXiv:2412.19437). Group sizes stay on the
device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from triplane_kernels import grouped_gemm_reference
from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.operands import Operand, Operands
from triplane_kernels.tuning import workload

SHAPES = [
    (32768, 2048, 7168, 8),
    (32768, 7168, 2048, 8),
    (65536, 1536, 2048, 128),
    (65536, 2048, 768, 128),
    (8192, 1536, 2048, 128),
]
"""M, N, K, groups: DeepSeek-V3's and Qwen3-30B-A3B's expert layers."""


def grouped_gemm(a: Operand, b: Operand, offsets: Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """out[m] = b[g] @ a[m] for every row m of group g.

    a: [M, K] bfloat16, float32 or float64; or codes [M, K] and scales [M, ceil(K/128)], as `quantize_activations` gives
    them. b: [G, N, K] of a's dtype; or codes [G, N, K] and scales [G, ceil(N/128), ceil(K/128)], as `quantize_weights`
    gives them. offsets: int32 [G + 1] on the same device, from 0, rising: group g holds rows offsets[g] to offsets[g +
    1]; groups may be empty. Returns [M, N] in out_dtype, zero for rows of no group. Plain operands carry gradients.
    Raises KernelInputError.
    """
    both = Operands.check("grouped_gemm", a, b)
    _check_rows("grouped_gemm", both, offsets, depth=2)
    return _grouped_gemm(*both.flat, offsets, False, out_dtype)


def grouped_gemm_dgrad(
    grad: Operand, b: Operand, offsets: Tensor, *, transposed: bool = False, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """out[m] = b[g]^T @ grad[m]: the gradient of `grouped_gemm` with respect to a.

    grad: [M, N], plain or quantized by rows. b: [G, N, K], the forward's operand. transposed: b is [G, K, N] instead,
    codes_t and scales_t of `quantize_weights_both`. FP8 units read both operands along the summed dimension, so
    untransposed codes are copied first. Returns [M, K].
    """
    both = Operands.check("grouped_gemm_dgrad", grad, b)
    if both.b_scales is not None and not transposed:
        both, transposed = replace(both, b=both.b.mT.contiguous(), b_scales=both.b_scales.mT), True
    _check_rows("grouped_gemm_dgrad", both, offsets, depth=2 if transposed else 1)
    return _grouped_gemm(*both.flat, offsets, not transposed, out_dtype)


def grouped_gemm_wgrad(grad: Operand, a: Operand, offsets: Tensor, *, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """out[g] = sum over the rows m of group g of grad[m] a[m]^T: the gradient of `grouped_gemm` with respect to b.

    grad: [M, N] and a: [M, K], plain; or the last two results of `quantize_both` of each: codes [N, M] and scales [N,
    ceil(M/128)], codes [K, M] and scales [K, ceil(M/128)]. Adjacent groups may share a block of 128 rows; with offsets
    that are multiples of 128, as from `permute`, none do. Returns [G, N, K] in out_dtype, zero for an empty group.
    Raises KernelInputError.
    """
    both = Operands.check("grouped_gemm_wgrad", grad, a)
    _check_offsets("grouped_gemm_wgrad", offsets)
    side = 1 if both.fp8 else 0
    if both.a.dim() != 2 or both.b.dim() != 2 or both.a.shape[side] != both.b.shape[side]:
        raise KernelInputError(
            f"grouped_gemm_wgrad: grad {list(both.a.shape)} and a {list(both.b.shape)} must be matrices with the "
            f"same rows M ({'[N, M] and [K, M] in FP8' if side else '[M, N] and [M, K]'})"
        )
    for values, scales in ((both.a, both.a_scales), (both.b, both.b_scales)):
        if scales is not None and scales.shape != (values.shape[0], -(-values.shape[1] // 128)):
            raise KernelInputError(
                f"grouped_gemm_wgrad: scales {list(scales.shape)} of codes {list(values.shape)} must be one for each"
                " 128 columns of a row, as the last two results of quantize_both are"
            )
    return _grouped_gemm_wgrad(*both.flat, offsets, out_dtype)


def _check_rows(op: str, both: Operands, offsets: Tensor, depth: int) -> None:
    _check_offsets(op, offsets)
    a, b = both.a, both.b
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[depth] or b.shape[0] != offsets.numel() - 1:
        raise KernelInputError(
            f"{op}: rows {list(a.shape)}, matrices {list(b.shape)} and {offsets.numel()} offsets don't fit: the rows'"
            f" width must be the matrices' dimension {depth}, and offsets one more than the matrices"
        )
    if both.a_scales is None or both.b_scales is None:
        return
    wide, high = -(-a.shape[1] // 128), -(-b.shape[1] // 128)
    wanted = [a.shape[0], wide], [b.shape[0], high, wide]
    if [list(both.a_scales.shape), list(both.b_scales.shape)] != list(wanted):
        raise KernelInputError(
            f"{op}: scales {list(both.a_scales.shape)} and {list(both.b_scales.shape)} must be {wanted[0]} and"
            f" {wanted[1]}"
        )


def _check_offsets(op: str, offsets: Tensor) -> None:
    if offsets.dim() != 1 or offsets.dtype != torch.int32 or not offsets.numel():
        raise KernelInputError(f"{op}: offsets are {offsets.dtype} {list(offsets.shape)}; give int32 [groups + 1]")


def _fake(*inputs: Any) -> Tensor:
    a, _, b, _, _, transposed, out_dtype = inputs
    out: Tensor = a.new_empty((a.shape[0], b.shape[2 if transposed else 1]), dtype=out_dtype)
    return out


def _fake_wgrad(*inputs: Any) -> Tensor:
    grad, grad_scales, a, _, offsets, out_dtype = inputs
    side = 1 if grad_scales is None else 0
    out: Tensor = a.new_empty((offsets.shape[0] - 1, grad.shape[side], a.shape[side]), dtype=out_dtype)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, b, _, offsets, ctx.transposed, _ = inputs
    ctx.save_for_backward(a, b, offsets)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = ctx.saved_tensors
    gradient = gradient.to(a.dtype).contiguous()
    of_a = of_b = None
    if ctx.needs_input_grad[0]:
        of_a = _grouped_gemm(gradient, None, b, None, offsets, not ctx.transposed, a.dtype)
    if ctx.needs_input_grad[2]:
        left, right = (a, gradient) if ctx.transposed else (gradient, a)
        of_b = _grouped_gemm_wgrad(left, None, right, None, offsets, b.dtype)
    return of_a, None, of_b, None, None, None, None


def _save_wgrad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, _, a, _, offsets, _ = inputs
    ctx.save_for_backward(grad, a, offsets)


def _backward_wgrad(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    grad, a, offsets = ctx.saved_tensors
    gradient = gradient.to(a.dtype).contiguous()
    of_grad = of_a = None
    if ctx.needs_input_grad[0]:
        of_grad = _grouped_gemm(a, None, gradient, None, offsets, False, grad.dtype)
    if ctx.needs_input_grad[2]:
        of_a = _grouped_gemm(grad, None, gradient, None, offsets, True, a.dtype)
    return of_grad, None, of_a, None, None, None


@operator("grouped_gemm", fake=_fake, save=_save, backward=_backward)
def _grouped_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    both = Operands(a, a_scales, b, b_scales)
    way = choose("grouped_gemm", *both.tensors, offsets)
    if way == "reference":
        return grouped_gemm_reference.grouped_gemm(both, offsets, transposed, out_dtype)
    from triplane_kernels import grouped_gemm_triton

    return grouped_gemm_triton.grouped_gemm(both, offsets, transposed, out_dtype, gluon=way == "gluon")


@operator("grouped_gemm_wgrad", fake=_fake_wgrad, save=_save_wgrad, backward=_backward_wgrad)
def _grouped_gemm_wgrad(
    grad: Tensor,
    grad_scales: Tensor | None,
    a: Tensor,
    a_scales: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    both = Operands(grad, grad_scales, a, a_scales)
    if choose("grouped_gemm_wgrad", *both.tensors, offsets) == "reference":
        return grouped_gemm_reference.grouped_gemm_wgrad(both, offsets, out_dtype)
    from triplane_kernels import grouped_wgrad_triton

    return grouped_wgrad_triton.grouped_gemm_wgrad(both, offsets, out_dtype)


@workload("grouped_gemm", SHAPES)
def _tune(rows: int, columns: int, depth: int, groups: int) -> None:
    from triplane_kernels.quantize import quantize_activations, quantize_both, quantize_weights_both

    a, grad = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (depth, columns))
    b = torch.randn(groups, columns, depth, device="cuda", dtype=torch.bfloat16)
    offsets = torch.arange(groups + 1, device="cuda", dtype=torch.int32) * (rows // groups)
    grouped_gemm(a, b, offsets)
    grouped_gemm_dgrad(grad, b, offsets)
    grouped_gemm_wgrad(grad, a, offsets, out_dtype=torch.bfloat16)
    codes, scales, codes_t, scales_t = quantize_weights_both(b)
    grouped_gemm(quantize_activations(a), (codes, scales), offsets)
    grouped_gemm_dgrad(quantize_activations(grad), (codes_t, scales_t), offsets, transposed=True)
    grouped_gemm_wgrad(quantize_both(grad)[2:], quantize_both(a)[2:], offsets, out_dtype=torch.bfloat16)
