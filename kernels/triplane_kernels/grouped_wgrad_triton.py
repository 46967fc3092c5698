"""The persistent Triton kernel of wgrad: one matrix a group, summed over the group's rows. Tiles are dealt as in
`grouped_gemm_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.launch_triton import (
    SMALL_FP8,
    SMALL_PLAIN,
    by_tma,
    named_configs,
    operand,
    programs,
    tile_config,
)
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.operands import Operands
from triplane_kernels.product_triton import place, product, tile
from triplane_kernels.tuning import Config, lookup

BLOCK = tl.constexpr(128)
"""Rows of an FP8 block, along which every scale changes."""
FP8_CONFIGS = [
    tile_config(128, 128, 128, 8, 5),
    tile_config(128, 128, 128, 8, 4),
    tile_config(128, 128, 128, 8, 5, band=4),
    tile_config(128, 64, 128, 8, 5),
    tile_config(64, 128, 128, 8, 5),
]


def grouped_gemm_wgrad(both: Operands, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """As the reference of that name."""
    fp8, grad, a, offsets = both.fp8, both.a.contiguous(), both.b.contiguous(), offsets.contiguous()
    total = grad.shape[1 if fp8 else 0]
    height, width = (grad.shape[0], a.shape[0]) if fp8 else (grad.shape[1], a.shape[1])
    groups = offsets.numel() - 1
    out = grad.new_empty(groups, height, width, dtype=out_dtype)
    scales = grad if both.a_scales is None else both.a_scales, a if both.b_scales is None else both.b_scales

    def launch(config: Config) -> Tensor:
        config = dict(config)
        rows, columns, depth = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        tma = by_tma(grad, a)
        grad_block, a_block = ([rows, depth], [columns, depth]) if fp8 else ([depth, rows], [depth, columns])
        tiles = groups * triton.cdiv(height, rows) * triton.cdiv(width, columns)
        _wgrad_kernel[(min(tiles, programs(config)),)](
            grad,
            a,
            operand(grad, grad_block, tma),
            operand(a, a_block, tma),
            out,
            *scales,
            offsets,
            height,
            width,
            groups,
            grad.stride(0),
            a.stride(0),
            *scales[0].stride(),
            *scales[1].stride(),
            FP8=fp8,
            TMA=tma,
            **config,
        )
        return out

    if out.numel():
        name, configs = named_configs("grouped_gemm_wgrad", grad, by_tma(grad, a), FP8_CONFIGS)
        shape = (total, height, width, groups)
        launch(lookup(name, shape, configs, launch, small=SMALL_FP8 if fp8 else SMALL_PLAIN))
    return out


@triton.jit
def _wgrad_kernel(
    grad: tl.tensor,
    a: tl.tensor,
    grad_tiles: tl.tensor,
    a_tiles: tl.tensor,
    out: tl.tensor,
    grad_scales: tl.tensor,
    a_scales: tl.tensor,
    offsets: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
    grad_row: tl.tensor,
    a_row: tl.tensor,
    grad_scale_row: tl.tensor,
    grad_scale_column: tl.tensor,
    a_scale_row: tl.tensor,
    a_scale_column: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    FP8: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """out[g] [height, width] = sum over the group's rows.

    FP8: operands lie along the rows, whose 128-wide blocks begin at multiples of 128.
    """
    down, across = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    for at in range(tl.program_id(0), groups * down * across, tl.num_programs(0)):
        group = at // (down * across)
        start, end = tl.load(offsets + group), tl.load(offsets + group + 1)
        first_row, first_column = place(at % (down * across), down, across, BLOCK_M, BLOCK_N, BAND)
        row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        origin = start // BLOCK_K * BLOCK_K if FP8 else start
        # whole blocks lie in the group; those at its ends may hold rows of its neighbours, and are masked
        first_whole = tl.cdiv(start - origin, BLOCK_K)
        after_whole = (end - origin) // BLOCK_K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first_whole, after_whole):
            k = origin + step * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
            if FP8:
                # before the product, so that they arrive while the matrix units work
                left, right = _scales(
                    grad_scales,
                    a_scales,
                    row,
                    column,
                    k // BLOCK,
                    height,
                    width,
                    grad_scale_row,
                    grad_scale_column,
                    a_scale_row,
                    a_scale_column,
                )
            if TMA and FP8:
                x, y = grad_tiles.load([first_row, k]), a_tiles.load([first_column, k]).T
            elif TMA:
                x, y = grad_tiles.load([k, first_row]).T, a_tiles.load([k, first_column])
            else:
                x, y = _columns(grad, a, row, column, deep, start, end, height, width, grad_row, a_row, FP8)
            if FP8:
                total += product(x, y) * left[:, None] * right[None, :]
            else:
                total += product(x, y)
        behind = ((end - origin) % BLOCK_K > 0) & (after_whole >= first_whole)
        # a group without rows reads nothing: its neighbours' scales may be NaN
        ends = tl.where(end > start, (first_whole > 0).to(tl.int32) + behind.to(tl.int32), 0)
        for step in range(ends):
            k = origin + tl.where((step == 0) & (first_whole > 0), 0, after_whole) * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
            if FP8:
                left, right = _scales(
                    grad_scales,
                    a_scales,
                    row,
                    column,
                    k // BLOCK,
                    height,
                    width,
                    grad_scale_row,
                    grad_scale_column,
                    a_scale_row,
                    a_scale_column,
                )
            x, y = _columns(grad, a, row, column, deep, start, end, height, width, grad_row, a_row, FP8)
            if FP8:
                total += product(x, y) * left[:, None] * right[None, :]
            else:
                total += product(x, y)
        to = out + group.to(tl.int64) * height * width + row[:, None].to(tl.int64) * width + column[None, :]
        tl.store(to, narrow(total, out.dtype.element_ty), mask=(row[:, None] < height) & (column[None, :] < width))


@triton.jit
def _columns(
    grad: tl.tensor,
    a: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    deep: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    grad_row: tl.tensor,
    a_row: tl.tensor,
    FP8: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The tiles [rows, deep] and [deep, columns] of both operands, zero outside the group."""
    kept = (deep >= start) & (deep < end)
    if FP8:
        x = tile(grad, row, deep, grad_row, (row[:, None] < height) & kept[None, :])
        y = tile(a, column, deep, a_row, (column[:, None] < width) & kept[None, :]).T
    else:
        x = tile(grad, deep, row, grad_row, kept[:, None] & (row[None, :] < height)).T
        y = tile(a, deep, column, a_row, kept[:, None] & (column[None, :] < width))
    return x, y


@triton.jit
def _scales(
    grad_scales: tl.tensor,
    a_scales: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    block: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    grad_row: tl.tensor,
    grad_column: tl.tensor,
    a_row: tl.tensor,
    a_column: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The scales of the tile's rows and columns for one block of rows of the operands."""
    left = tl.load(grad_scales + row.to(tl.int64) * grad_row + block * grad_column, mask=row < height, other=0.0)
    right = tl.load(a_scales + column.to(tl.int64) * a_row + block * a_column, mask=column < width, other=0.0)
    return left, right
