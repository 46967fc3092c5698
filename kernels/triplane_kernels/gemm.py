"""One matrix product in FP8 blocks or plain: out = a @ b^T, both operands along the sum.

forward  gemm(quantize_activations(x), quantize_weights(w))               x [M, K], w [N, K] -> [M, N]
dgrad    gemm(quantize_activations(grad), quantize_weights_both(w)[2:])   grad [M, N] -> [M, K]
wgrad    gemm(quantize_both(grad)[2:], quantize_both(x)[2:])              -> [N, K]

Plain operands go to torch. Codes go to cuBLAS where it takes blocks (Hopper, CUDA 12.9, N and K multiples of 16), else
to the kernel of the grouped products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose, forced, machine
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
    if both.a_scales is None or both.b_scales is None:
        return _plain(both.a, both.b, out_dtype)
    dequantize = dequantize_rows if _scaled_by_rows(both) else dequantize_weights
    left = dequantize_rows(both.a, both.a_scales, torch.float32)
    return (left @ dequantize(both.b, both.b_scales, torch.float32).t()).to(out_dtype)


def _plain(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch's product, with sums in float32 or float64."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        if out_dtype == torch.bfloat16:
            return a @ b.t()
        return torch.mm(a, b.t(), out_dtype=torch.float32).to(out_dtype)
    left, right = (part if part.dtype == torch.float64 else part.float() for part in (a, b))
    return (left @ right.t()).to(out_dtype)


def _scaled_by_rows(both: Operands) -> bool:
    return both.b_scales is not None and both.b_scales.shape[0] == both.b.shape[0]


def cublas_takes(both: Operands, out_dtype: torch.dtype) -> bool:
    """Whether `torch.nn.functional.scaled_mm` computes the product of these codes, with these blocks."""
    if not both.a.is_cuda or not both.a.numel() or not both.b.numel() or not hasattr(F, "scaled_mm"):
        return False
    release = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    fits = both.b.shape[0] % 16 == 0 and both.b.shape[1] % 16 == 0 and out_dtype in (torch.bfloat16, torch.float32)
    return fits and machine().capability == (9, 0) and release >= (12, 9)


def _by_cublas(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Its scales lie column by column; those of rows for a multiple of 4 rows, those of weights for a multiple of 4
    columns of blocks.
    """
    rows = a.shape[0]
    if more := -rows % 4:
        a = F.pad(a.view(torch.uint8), (0, 0, 0, more)).view(a.dtype)
        a_scales = F.pad(a_scales.t(), (0, more)).t()
    by_row, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    if b_scales.shape[0] == b.shape[0]:
        kind, right = by_row, b_scales.t().contiguous().t()
    else:
        kind, right = square, F.pad(b_scales, (0, -b_scales.shape[1] % 4)).contiguous().t()
    left = a_scales.t().contiguous().t()
    return F.scaled_mm(a.contiguous(), b.contiguous().t(), left, by_row, right, kind, output_dtype=out_dtype)[:rows]


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
    if choose("gemm", *both.tensors) == "reference" or a_scales is None or b_scales is None:
        return _reference(both, out_dtype)
    if forced() is None and cublas_takes(both, out_dtype):
        return _by_cublas(a, a_scales, b, b_scales, out_dtype)
    from triplane_kernels import grouped_gemm_triton

    return grouped_gemm_triton.gemm(both, out_dtype)


@workload("gemm", [(8192, 8192, 8192), (4096, 7168, 2048), (32768, 2048, 4096)])
def _tune(rows: int, columns: int, depth: int) -> None:
    from triplane_kernels import grouped_gemm_triton
    from triplane_kernels.quantize import quantize_activations, quantize_weights

    a, b = (torch.randn(size, depth, device="cuda", dtype=torch.bfloat16) for size in (rows, columns))
    grouped_gemm_triton.gemm(Operands(*quantize_activations(a), *quantize_weights(b)), torch.bfloat16)
