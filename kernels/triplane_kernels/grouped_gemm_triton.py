"""Persistent Triton kernels of the grouped products, and how they are launched.

One program a multiprocessor (or a few) walks over the output tiles; which group a tile belongs to is found on the device, from the offsets.
Tiles of the operands come by TMA descriptor where the memory layout allows it. Each 128-deep FP8 product starts from a fresh accumulator in the
tensor cores, which keep about 14 bits of a sum, and is scaled and added in float32 registers.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triplane_kernels.machine import machine
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.product_triton import product, tile
from triplane_kernels.tuning import Config, lookup

BLOCK = tl.constexpr(128)
"""Depth of an FP8 block, along which every scale of the activations changes."""


def _config(rows: int, columns: int, depth: int, warps: int, stages: int, programs: int = 1, band: int = 8) -> Config:
    """band: row tiles walked together, so that their columns' operand stays in L2; programs: of them a multiprocessor."""
    return {
        "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": depth, "BAND": band, "PROGRAMS": programs,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


# compiled for Hopper without a spilled register, but for 128x256, which spills a few
FP8_CONFIGS = [
    _config(128, 128, 128, 8, 5), _config(128, 128, 128, 8, 4), _config(64, 128, 128, 4, 4, programs=2), _config(64, 256, 128, 8, 4),
    _config(128, 256, 128, 8, 3), _config(64, 128, 128, 4, 6), _config(128, 128, 128, 8, 5, band=16),
]  # fmt: skip
FP8_WGRAD_CONFIGS = [
    _config(128, 128, 128, 8, 5), _config(128, 128, 128, 8, 4), _config(128, 128, 128, 8, 5, band=4), _config(128, 64, 128, 4, 5, programs=2),
    _config(128, 64, 128, 8, 5), _config(64, 128, 128, 8, 5),
]  # fmt: skip
PLAIN_CONFIGS = [
    _config(128, 256, 64, 8, 4), _config(128, 256, 64, 8, 3), _config(128, 128, 64, 8, 5), _config(128, 128, 64, 4, 4, programs=2),
    _config(64, 128, 64, 4, 4, programs=2), _config(64, 64, 32, 4, 3, programs=2),
]  # fmt: skip
SMALL_FP8 = _config(64, 128, 128, 4, 1, programs=3, band=2)
SMALL_PLAIN = _config(64, 64, 64, 4, 1, programs=3, band=2)


def grouped_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor | None,
    offsets: Tensor,
    transposed: bool,
    out_dtype: torch.dtype,
    *,
    gluon: bool = False,
) -> Tensor:
    """As the reference of that name. gluon: FP8 products run on the Gluon kernel; without, the faster of both, as tuning finds."""
    return _launch_rows(a, a_scales, b, b_scales, offsets, transposed, out_dtype, gluon=gluon)


def gemm(a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """One group of every row: a [M, K] by b [N, K]; b_scales [ceil(N/128), ceil(K/128)], or [N, ceil(K/128)] for rows scaled one by one."""
    rows_scaled = b_scales is not None and b_scales.shape[0] == b.shape[0]
    stacked = None if b_scales is None else b_scales[None]
    return _launch_rows(a, a_scales, b[None], stacked, None, False, out_dtype, rows_scaled=rows_scaled)


def grouped_gemm_wgrad(
    grad: Tensor,
    grad_scales: Tensor | None,
    a: Tensor,
    a_scales: Tensor | None,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """As the reference of that name."""
    fp8 = grad_scales is not None
    grad, a = grad.contiguous(), a.contiguous()
    total = grad.shape[1 if fp8 else 0]
    height, width = (grad.shape[0], a.shape[0]) if fp8 else (grad.shape[1], a.shape[1])
    groups = offsets.numel() - 1
    out = grad.new_empty(groups, height, width, dtype=out_dtype)
    offsets, scales = (
        offsets.contiguous(),
        (grad if grad_scales is None else grad_scales, a if a_scales is None else a_scales),
    )

    def launch(config: Config) -> None:
        config = dict(config)
        rows, columns, depth = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        tma = _tma(grad, a)
        grad_block, a_block = ([rows, depth], [columns, depth]) if fp8 else ([depth, rows], [depth, columns])
        tiles = groups * triton.cdiv(height, rows) * triton.cdiv(width, columns)
        _wgrad_kernel[(min(tiles, _programs(config)),)](
            grad, a, _descriptor(grad, grad_block) if tma else grad, _descriptor(a, a_block) if tma else a, out, *scales, offsets,
            height, width, groups, grad.stride(0), a.stride(0), *scales[0].stride(), *scales[1].stride(),
            FP8=fp8, TMA=tma, **config,
        )  # fmt: skip

    if out.numel():
        launch(
            lookup(
                f"grouped_gemm_wgrad_{_kind(grad)}", (total, height, width, groups), FP8_WGRAD_CONFIGS if fp8 else PLAIN_CONFIGS, launch,
                small=SMALL_FP8 if fp8 else SMALL_PLAIN,
            )
        )  # fmt: skip
    return out


def _launch_rows(
    a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor | None, offsets: Tensor | None, transposed: bool,
    out_dtype: torch.dtype, *, rows_scaled: bool = False, gluon: bool = False,
) -> Tensor:  # fmt: skip
    a, b = a.contiguous(), b.contiguous()
    (rows, depth), groups = a.shape, b.shape[0]
    columns = b.shape[2 if transposed else 1]
    out = a.new_empty(rows, columns, dtype=out_dtype)
    fp8 = a_scales is not None and b_scales is not None
    left, right = (a_scales, b_scales) if a_scales is not None and b_scales is not None else (a[:1], b[:1, :1])
    bounds = a if offsets is None else offsets.contiguous()

    def launch(config: Config) -> None:
        if config.get("GLUON"):
            _gluon().grouped_gemm(a, left, b, right, bounds, out, config)
            return
        config = dict(config)
        high, wide, deep = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        # a transposed matrix's last tile would reach into the next group's rows: their infinity times zero is NaN
        tma = _tma(a, b) and not (transposed and depth % deep)
        flat = b.view(-1, b.shape[2]) if tma else b
        tiles = (triton.cdiv(rows, high) + groups) * triton.cdiv(columns, wide)
        _rows_kernel[(min(tiles, _programs(config)),)](
            _descriptor(a, [high, deep]) if tma else a, _descriptor(flat, [deep, wide] if transposed else [wide, deep]) if tma else b,
            out, left, right, bounds, rows, columns, depth, groups, depth, b.stride(0), b.stride(1), *left.stride(), *right.stride(),
            GROUPS=triton.next_power_of_2(groups + 1), FP8=fp8, TRANSPOSED=transposed, DENSE=offsets is None, ROWS_SCALED=rows_scaled,
            TMA=tma, **config,
        )  # fmt: skip

    if out.numel():
        name = f"{'gemm' if offsets is None else 'grouped_gemm'}_{_kind(a)}{'_transposed' if transposed else ''}"
        shape = (rows, columns, depth, groups)
        configs, small = (FP8_CONFIGS, SMALL_FP8) if fp8 else (PLAIN_CONFIGS, SMALL_PLAIN)
        if fp8 and offsets is not None and machine().gluon and _tma(a, b):
            name, configs = (f"{name}_gluon", _gluon().CONFIGS) if gluon else (name, configs + _gluon().CONFIGS)
        launch(lookup(name, shape, configs, launch, small=small))
    return out


def _gluon() -> ModuleType:
    return importlib.import_module("triplane_kernels.grouped_gemm_gluon")


def _kind(values: Tensor) -> str:
    return "fp8" if values.dtype == torch.float8_e4m3fn else str(values.dtype).removeprefix("torch.")


def _programs(config: Config) -> int:
    return machine().multiprocessors * config.pop("PROGRAMS")


def _tma(*matrices: Tensor) -> bool:
    """Whether descriptors can name these contiguous tensors: 16-byte aligned rows, not empty, on a machine that has them."""
    here = machine()
    fits = all(
        matrix.numel() and matrix.data_ptr() % 16 == 0 and matrix.shape[-1] * matrix.element_size() % 16 == 0
        for matrix in matrices
    )
    return (here.tma or here.interpreter) and fits


def _descriptor(matrix: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)


@triton.jit
def _rows_kernel(
    a: tl.tensor, b: tl.tensor, out: tl.tensor, a_scales: tl.tensor, b_scales: tl.tensor, offsets: tl.tensor,
    rows: tl.tensor, columns: tl.tensor, depth: tl.tensor, groups: tl.tensor, a_row: tl.tensor, b_matrix: tl.tensor, b_row: tl.tensor,
    a_scale_row: tl.tensor, a_scale_column: tl.tensor, b_scale_matrix: tl.tensor, b_scale_row: tl.tensor, b_scale_column: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, GROUPS: tl.constexpr,
    FP8: tl.constexpr, TRANSPOSED: tl.constexpr, DENSE: tl.constexpr, ROWS_SCALED: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
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
        first_row, first_column = _place(within, tl.cdiv(end - start, BLOCK_M), across, BLOCK_M, BLOCK_N, BAND)
        first_row += start
        row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.where(chosen < groups, tl.cdiv(depth, BLOCK_K), 0)):
            k = step * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
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
            if FP8:
                scale = tl.load(
                    a_scales + row.to(tl.int64) * a_scale_row + step * a_scale_column, mask=row < end, other=0.0
                )
                at_scale = b_scales + chosen.to(tl.int64) * b_scale_matrix + step * b_scale_column
                if ROWS_SCALED:
                    other = tl.load(at_scale + column * b_scale_row, mask=column < columns, other=0.0)
                    total += product(x, y) * scale[:, None] * other[None, :]
                elif BLOCK_N > BLOCK:
                    other = tl.load(at_scale + column // BLOCK * b_scale_row, mask=column < columns, other=0.0)
                    total += product(x, y) * scale[:, None] * other[None, :]
                else:
                    scale *= tl.load(at_scale + first_column // BLOCK * b_scale_row)
                    total += product(x, y) * scale[:, None]
            else:
                total += product(x, y)
        inside = (row[:, None] < end) & (column[None, :] < columns)
        to = out + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(to, narrow(total, out.dtype.element_ty), mask=inside)


@triton.jit
def _place(
    within: tl.tensor, down: tl.tensor, across: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """First row and column of tile `within` of a grid of down x across: bands of BAND rows, each walked column by column."""
    band = within // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    rest = within - band * BAND * across
    return (band * BAND + rest % height) * BLOCK_M, rest // height * BLOCK_N


@triton.jit
def _wgrad_kernel(
    grad: tl.tensor, a: tl.tensor, grad_tiles: tl.tensor, a_tiles: tl.tensor, out: tl.tensor, grad_scales: tl.tensor, a_scales: tl.tensor,
    offsets: tl.tensor, height: tl.tensor, width: tl.tensor, groups: tl.tensor, grad_row: tl.tensor, a_row: tl.tensor,
    grad_scale_row: tl.tensor, grad_scale_column: tl.tensor, a_scale_row: tl.tensor, a_scale_column: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """out[g] [height, width] = sum over the group's rows. FP8: operands lie along the rows, whose 128-wide blocks begin at multiples of 128."""
    down, across = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    for at in range(tl.program_id(0), groups * down * across, tl.num_programs(0)):
        group = at // (down * across)
        start, end = tl.load(offsets + group), tl.load(offsets + group + 1)
        first_row, first_column = _place(at % (down * across), down, across, BLOCK_M, BLOCK_N, BAND)
        row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
        origin = start // BLOCK_K * BLOCK_K if FP8 else start
        # whole blocks lie in the group; those at its ends may hold rows of its neighbours, and are masked
        first_whole = tl.cdiv(start - origin, BLOCK_K)
        after_whole = (end - origin) // BLOCK_K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first_whole, after_whole):
            k = origin + step * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
            if TMA and FP8:
                x, y = grad_tiles.load([first_row, k]), a_tiles.load([first_column, k]).T
            elif TMA:
                x, y = grad_tiles.load([k, first_row]).T, a_tiles.load([k, first_column])
            else:
                x, y = _columns(grad, a, row, column, deep, start, end, height, width, grad_row, a_row, FP8)
            part = product(x, y)
            if FP8:
                part = _scaled(part, grad_scales, a_scales, row, column, k // BLOCK, height, width,
                               grad_scale_row, grad_scale_column, a_scale_row, a_scale_column)  # fmt: skip
            total += part
        ends = (first_whole > 0).to(tl.int32) + ((end - origin) % BLOCK_K > 0).to(tl.int32) * (
            after_whole >= first_whole
        ).to(tl.int32)
        for step in range(ends):
            k = origin + tl.where((step == 0) & (first_whole > 0), 0, after_whole) * BLOCK_K
            deep = k + tl.arange(0, BLOCK_K)
            x, y = _columns(grad, a, row, column, deep, start, end, height, width, grad_row, a_row, FP8)
            part = product(x, y)
            if FP8:
                part = _scaled(part, grad_scales, a_scales, row, column, k // BLOCK, height, width,
                               grad_scale_row, grad_scale_column, a_scale_row, a_scale_column)  # fmt: skip
            total += part
        to = out + group.to(tl.int64) * height * width + row[:, None].to(tl.int64) * width + column[None, :]
        tl.store(to, narrow(total, out.dtype.element_ty), mask=(row[:, None] < height) & (column[None, :] < width))


@triton.jit
def _columns(
    grad: tl.tensor, a: tl.tensor, row: tl.tensor, column: tl.tensor, deep: tl.tensor, start: tl.tensor, end: tl.tensor,
    height: tl.tensor, width: tl.tensor, grad_row: tl.tensor, a_row: tl.tensor, FP8: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
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
def _scaled(
    part: tl.tensor, grad_scales: tl.tensor, a_scales: tl.tensor, row: tl.tensor, column: tl.tensor, block: tl.tensor, height: tl.tensor,
    width: tl.tensor, grad_row: tl.tensor, grad_column: tl.tensor, a_row: tl.tensor, a_column: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """A partial sum over one block of rows times the scales of both sides there."""
    left = tl.load(grad_scales + row.to(tl.int64) * grad_row + block * grad_column, mask=row < height, other=0.0)
    right = tl.load(a_scales + column.to(tl.int64) * a_row + block * a_column, mask=column < width, other=0.0)
    return part * left[:, None] * right[None, :]
