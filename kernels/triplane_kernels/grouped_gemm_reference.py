"""Grouped products of rows with one matrix per group, in torch: dequantize, then one product per group, in float32
(float64 for float64 operands).

Reads the group sizes on the host, so on CUDA it waits for the device; the kernels never do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from triplane_kernels.operands import Operands
from triplane_kernels.quantize_reference import dequantize_rows, dequantize_weights


def grouped_gemm(both: Operands, offsets: Tensor, transposed: bool, out_dtype: torch.dtype) -> Tensor:
    """out[m] = b[g] @ a[m], or b[g]^T @ a[m] if `transposed`, for the rows m of group g; zero for rows of no group."""
    left, right = _rows(both.a, both.a_scales), _matrices(both.b, both.b_scales)
    right = right if transposed else right.mT
    out = left.new_zeros(both.a.shape[0], right.shape[2])
    for group, rows in _groups(offsets):
        out[rows] = left[rows] @ right[group]
    return out.to(out_dtype)


def grouped_gemm_wgrad(both: Operands, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """out[g] = a[m]^T @ b[m] over the rows m of group g.

    FP8 operands are transposed, [N, M] and [K, M], and scaled along M.
    """
    left, right = _rows(both.a, both.a_scales), _rows(both.b, both.b_scales)
    left, right = (left.t(), right.t()) if both.fp8 else (left, right)
    out = left.new_zeros(offsets.numel() - 1, left.shape[1], right.shape[1])
    for group, rows in _groups(offsets):
        out[group] = left[rows].t() @ right[rows]
    return out.to(out_dtype)


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    bounds = offsets.tolist()
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        yield group, slice(start, end)


def _rows(values: Tensor, scales: Tensor | None) -> Tensor:
    if scales is not None:
        return dequantize_rows(values, scales, torch.float32)
    return values if values.dtype == torch.float64 else values.float()


def _matrices(values: Tensor, scales: Tensor | None) -> Tensor:
    if scales is not None:
        return dequantize_weights(values, scales, torch.float32)
    return values if values.dtype == torch.float64 else values.float()
