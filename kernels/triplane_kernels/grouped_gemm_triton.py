"""Persistent Triton kernels of the grouped products, and how they are launched.

One program a multiprocessor (or a few) walks over the output tiles; which group a tile belongs to is found on the
device, from the offsets. Tiles of the operands come by TMA descriptor where the memory layout allows it. Each 128-deep
FP8 product starts from a fresh accumulator in the tensor cores, which keep about 14 bits of a sum, and is scaled and
added in float32 registers.
"""

from __future__ import annotations

import importlib
from types import ModuleType

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
from triplane_kernels.machine import forced, machine
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.operands import Operands
from triplane_kernels.product_triton import place, product, tile
from triplane_kernels.tuning import Config, lookup, tuning_now

BLOCK = tl.constexpr(128)
"""Depth of an FP8 block, along which every scale of the activations changes."""
FP8_CONFIGS = [
    tile_config(128, 128, 128, 8, 5),
    tile_config(128, 128, 128, 8, 4),
    tile_config(64, 128, 128, 4, 4, programs=2),
    tile_config(64, 256, 128, 8, 4),
    tile_config(64, 128, 128, 4, 6),
    tile_config(128, 128, 128, 8, 5, band=16),
]


def grouped_gemm(
    both: Operands, offsets: Tensor, transposed: bool, out_dtype: torch.dtype, *, gluon: bool = False
) -> Tensor:
    """As the reference of that name. gluon: FP8 products run on the Gluon kernel; without, on the faster of both where
    tuning has found it.
    """
    return _launch_rows(both, offsets, transposed, out_dtype, gluon=gluon)


def gemm(both: Operands, out_dtype: torch.dtype) -> Tensor:
    """One group of every row: a [M, K] by b [N, K]; b_scales [ceil(N/128), ceil(K/128)], or [N, ceil(K/128)] for rows
    scaled one by one.
    """
    rows_scaled = both.b_scales is not None and both.b_scales.shape[0] == both.b.shape[0]
    stacked = None if both.b_scales is None else both.b_scales[None]
    one = Operands(both.a, both.a_scales, both.b[None], stacked)
    return _launch_rows(one, None, False, out_dtype, rows_scaled=rows_scaled)


def _launch_rows(
    both: Operands,
    offsets: Tensor | None,
    transposed: bool,
    out_dtype: torch.dtype,
    *,
    rows_scaled: bool = False,
    gluon: bool = False,
) -> Tensor:
    a, b, fp8 = both.a.contiguous(), both.b.contiguous(), both.fp8
    (rows, depth), groups = a.shape, b.shape[0]
    columns = b.shape[2 if transposed else 1]
    out = a.new_empty(rows, columns, dtype=out_dtype)
    left, right = (
        a[:1] if both.a_scales is None else both.a_scales,
        b[:1, :1] if both.b_scales is None else both.b_scales,
    )
    bounds = a if offsets is None else offsets.contiguous()

    def launch(config: Config) -> Tensor:
        if config.get("GLUON"):
            _gluon().grouped_gemm(a, left, b, right, bounds, out, config)
            return out
        config = dict(config)
        high, wide, deep = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        # a transposed matrix's last tile would reach into the next group's rows: their infinity times zero is NaN
        tma = by_tma(a, b) and not (transposed and depth % deep)
        flat = b.view(-1, b.shape[2]) if tma else b
        tiles = (triton.cdiv(rows, high) + groups) * triton.cdiv(columns, wide)
        _rows_kernel[(min(tiles, programs(config)),)](
            operand(a, [high, deep], tma),
            operand(flat, [deep, wide] if transposed else [wide, deep], tma),
            out,
            left,
            right,
            bounds,
            rows,
            columns,
            depth,
            groups,
            depth,
            b.stride(0),
            b.stride(1),
            *left.stride(),
            *right.stride(),
            GROUPS=triton.next_power_of_2(groups + 1),
            FP8=fp8,
            TRANSPOSED=transposed,
            DENSE=offsets is None,
            ROWS_SCALED=rows_scaled,
            TMA=tma,
            **config,
        )
        return out

    if out.numel():
        op = "gemm" if offsets is None else "grouped_gemm_transposed" if transposed else "grouped_gemm"
        name, configs = named_configs(op, a, by_tma(a, b), FP8_CONFIGS)
        if fp8 and offsets is not None and machine().gluon and by_tma(a, b) and forced() != "triton":
            # names of their own: what Gluon takes must not be found for operands that it can't take
            if gluon:
                name, configs = f"{name}_gluon", _gluon().CONFIGS
            else:
                name, configs = f"{name}_hopper", [*configs, *(_gluon().CONFIGS if tuning_now() else ())]
        launch(lookup(name, (rows, columns, depth, groups), configs, launch, small=SMALL_FP8 if fp8 else SMALL_PLAIN))
    return out


def _gluon() -> ModuleType:
    return importlib.import_module("triplane_kernels.grouped_gemm_gluon")


@triton.jit
def _rows_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    a_scales: tl.tensor,
    b_scales: tl.tensor,
    offsets: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    groups: tl.tensor,
    a_row: tl.tensor,
    b_matrix: tl.tensor,
    b_row: tl.tensor,
    a_scale_row: tl.tensor,
    a_scale_column: tl.tensor,
    b_scale_matrix: tl.tensor,
    b_scale_row: tl.tensor,
    b_scale_column: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DENSE: tl.constexpr,
    ROWS_SCALED: tl.constexpr,
    TMA: tl.constexpr,
) -> None:
    """out[m] = b[g] @ a[m]. Rows after the last group make one more, of depth 0: its tiles store zeros."""
    group = tl.arange(0, GROUPS)
    if DENSE:
        starts = tl.where(group == 0, 0, rows)
        ends = tl.full((GROUPS,), 0, tl.int32) + rows
    else:
        starts = tl.load(offsets + group, mask=group <= groups, other=rows)
        ends = tl.load(offsets + group + 1, mask=group < groups, other=rows)
    across = tl.cdiv(columns, BLOCK_N)
    counts = tl.cdiv(ends - starts, BLOCK_M) * across
    lasts = tl.cumsum(counts, 0)
    for at in range(tl.program_id(0), tl.sum(counts, 0), tl.num_programs(0)):
        chosen = tl.sum((lasts <= at).to(tl.int32), 0)
        here = group == chosen
        start, end = tl.sum(tl.where(here, starts, 0), 0), tl.sum(tl.where(here, ends, 0), 0)
        within = at - tl.sum(tl.where(here, lasts - counts, 0), 0)
        first_row, first_column = place(within, tl.cdiv(end - start, BLOCK_M), across, BLOCK_M, BLOCK_N, BAND)
        first_row += start
        row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.where(chosen < groups, tl.cdiv(depth, BLOCK_K), 0)):
            k = step * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
            if FP8:
                # before the product, so that they arrive while the matrix units work
                of_rows = a_scales + row.to(tl.int64) * a_scale_row + step * a_scale_column
                scale = tl.load(of_rows, mask=row < end, other=0.0)
                of_matrix = b_scales + chosen.to(tl.int64) * b_scale_matrix + step * b_scale_column
                if ROWS_SCALED:
                    other = tl.load(of_matrix + column * b_scale_row, mask=column < columns, other=0.0)
                elif BLOCK_N > BLOCK:
                    other = tl.load(of_matrix + column // BLOCK * b_scale_row, mask=column < columns, other=0.0)
                else:
                    other = tl.load(of_matrix + first_column // BLOCK * b_scale_row)
            if TMA:
                x = a.load([first_row, k])
            else:
                x = tile(a, row, deep, a_row, (row[:, None] < end) & (deep[None, :] < depth))
            if TMA and TRANSPOSED:
                y = b.load([chosen * depth + k, first_column])
            elif TMA:
                y = b.load([chosen * columns + first_column, k]).T
            elif TRANSPOSED:
                inside = (deep[:, None] < depth) & (column[None, :] < columns)
                y = tile(b + chosen.to(tl.int64) * b_matrix, deep, column, b_row, inside)
            else:
                inside = (column[:, None] < columns) & (deep[None, :] < depth)
                y = tile(b + chosen.to(tl.int64) * b_matrix, column, deep, b_row, inside).T
            if not FP8:
                total += product(x, y)
            elif ROWS_SCALED or BLOCK_N > BLOCK:
                total += product(x, y) * scale[:, None] * other[None, :]
            else:
                total += product(x, y) * (scale * other)[:, None]
        inside = (row[:, None] < end) & (column[None, :] < columns)
        to = out + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(to, narrow(total, out.dtype.element_ty), mask=inside)
