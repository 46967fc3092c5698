"""torch's implementations of the same products: `_grouped_mm`, row-scaled `_scaled_grouped_mm`, and a loop."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels_case import Work


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Work:
    """`torch._grouped_mm` in bfloat16: a [M, K] by b [G, N, K] transposed."""
    ends, turned = offsets[1:].contiguous(), b.mT
    return lambda: F.grouped_mm(a, turned, offs=ends)


def grouped_mm_wgrad(gradient: Tensor, a: Tensor, offsets: Tensor) -> Work:
    """`torch._grouped_mm` in bfloat16: gradient [M, N] transposed by a [M, K], one product per group."""
    ends, turned = offsets[1:].contiguous(), gradient.t()
    return lambda: F.grouped_mm(turned, a, offs=ends)


def row_scaled_grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Work:
    """`torch._scaled_grouped_mm`: FP8 with one scale per row, coarser than blocks. a [M, K], b [G, N, K] in
    bfloat16.
    """
    a_codes, a_scales = _by_row(a)
    b_codes, b_scales = _by_row(b)
    ends, turned, row = offsets[1:].contiguous(), b_codes.mT, F.ScalingType.RowWise
    return lambda: F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a_codes, turned, a_scales, row, b_scales, row, offs=ends, output_dtype=torch.bfloat16
    )


def loop(a: Tensor, b: Tensor, offsets: Tensor) -> Work:
    """One bfloat16 product per group in sequence, with group sizes on the host: the naive expert layer."""
    bounds = offsets.tolist()
    out = a.new_empty(a.shape[0], b.shape[1])

    def work() -> Tensor:
        for group, (begin, end) in enumerate(pairwise(bounds)):
            torch.mm(a[begin:end], b[group].t(), out=out[begin:end])
        return out

    return work


def loop_wgrad(gradient: Tensor, a: Tensor, offsets: Tensor) -> Work:
    """One bfloat16 product per group, for the weights' gradients."""
    bounds = offsets.tolist()
    out = a.new_empty(len(bounds) - 1, gradient.shape[1], a.shape[1])

    def work() -> Tensor:
        for group, (begin, end) in enumerate(pairwise(bounds)):
            torch.mm(gradient[begin:end].t(), a[begin:end], out=out[group])
        return out

    return work


def _by_row(matrix: Tensor) -> tuple[Tensor, Tensor]:
    scales = matrix.float().abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
    return (matrix.float() / scales[..., None]).to(torch.float8_e4m3fn), scales
