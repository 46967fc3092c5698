"""Triton kernels of the FP8 quantizers, and how they are launched. Results are bit for bit those of
`quantize_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels import quantize_reference
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.product_triton import decode
from triplane_kernels.rounding_triton import (
    INFINITY_BITS,
    block_scale,
    magnitude_bits,
    quotient,
    to_e4m3,
    to_float32,
    uniforms,
)
from triplane_kernels.tuning import Config, Results, lookup

BLOCK = tl.constexpr(128)
MX_BLOCK = tl.constexpr(32)
ROW_CONFIGS = [
    {"BLOCK_M": rows, "num_warps": warps, "num_stages": 1}
    for rows, warps in ((32, 4), (64, 4), (64, 8), (128, 8), (16, 4), (16, 2))
]
SQUARE_SMALL = {"num_warps": 8, "num_stages": 1}
# maxnreg: so few registers that another block of threads fits beside, to load while one computes
BOTH_CONFIGS = [
    SQUARE_SMALL,
    {"num_warps": 16, "num_stages": 1},
    {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
]
DEQUANTIZE_CONFIGS = [{"num_warps": warps, "num_stages": 1} for warps in (8, 4, 16)]
TRANSPOSE_CONFIGS = [
    {"BLOCK_N": rows, "BLOCK_K": columns, "num_warps": warps, "num_stages": 1}
    for rows, columns, warps in ((128, 128, 8), (128, 128, 4), (128, 64, 4), (64, 128, 4), (64, 64, 4))
]
WEIGHT_CONFIGS = [
    {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
    {"num_warps": 16, "num_stages": 1, "maxnreg": 64},
    {"num_warps": 16, "num_stages": 1},
]


def quantize_activations(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M, ceil(K/128)] of x [M, K]."""
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = x.new_empty(triton.cdiv(columns, 128), rows, dtype=torch.float32).t()

    def launch(config: Config) -> Results:
        grid = (triton.cdiv(rows, config["BLOCK_M"]), scales.shape[1])
        _rows_kernel[grid](
            x,
            codes,
            scales,
            seed or 0,
            rows,
            columns,
            x.stride(0),
            x.stride(1),
            scales.stride(1),
            POWER_OF_TWO=power_of_two,
            STOCHASTIC=seed is not None,
            **config,
        )
        return codes, scales

    if codes.numel():
        launch(lookup("quantize_activations", (rows, columns), ROW_CONFIGS, launch, small=ROW_CONFIGS[1]))
    return codes, scales


def quantize_both(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of x [M, K] along K, then of its transpose along M, from one read of x."""
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    codes_t = x.new_empty(columns, rows, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(triton.cdiv(columns, 128), rows, dtype=torch.float32).t()
    scales_t = x.new_empty(triton.cdiv(rows, 128), columns, dtype=torch.float32).t()

    def launch(config: Config) -> Results:
        _both_kernel[(scales_t.shape[1], scales.shape[1])](
            x,
            codes,
            scales,
            codes_t,
            scales_t,
            seed or 0,
            rows,
            columns,
            x.stride(0),
            x.stride(1),
            scales.stride(1),
            scales_t.stride(1),
            POWER_OF_TWO=power_of_two,
            STOCHASTIC=seed is not None,
            **config,
        )
        return codes, scales, codes_t, scales_t

    if codes.numel():
        launch(lookup("quantize_both", (rows, columns), BOTH_CONFIGS, launch, small=SQUARE_SMALL))
    return codes, scales, codes_t, scales_t


def quantize_weights(w: Tensor, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of each matrix of w [G, N, K], and of their transposes (empty unless `transposed`)."""
    count, rows, columns = w.shape
    row_blocks, column_blocks = triton.cdiv(rows, 128), triton.cdiv(columns, 128)
    codes = torch.empty_like(w, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = w.new_empty(count, row_blocks, column_blocks, dtype=torch.float32)

    def launch(config: Config) -> Results:
        _weights_kernel[(count * row_blocks, column_blocks)](
            w,
            codes,
            scales,
            rows,
            columns,
            row_blocks,
            column_blocks,
            *w.stride(),
            POWER_OF_TWO=power_of_two,
            **config,
        )
        return codes, scales

    if codes.numel():
        launch(lookup("quantize_weights", tuple(w.shape), WEIGHT_CONFIGS, launch, small=SQUARE_SMALL))
    if transposed:
        return codes, scales, transpose(codes), quantize_reference.transpose(scales)
    return codes, scales, codes.new_empty(0, columns, rows), scales.new_empty(0, column_blocks, row_blocks)


def transpose(codes: Tensor) -> Tensor:
    """Contiguous [G, K, N] of contiguous codes [G, N, K].

    A kernel of its own: the assembler of Triton 3.6 to 3.8 (ptxas 12.9) compiles one that stores a tile of codes just
    cast, and its transpose too, to wrong bytes (github.com/triton-lang/triton/issues/11111).
    """
    count, rows, columns = codes.shape
    turned = codes.new_empty(count, columns, rows)

    def launch(config: Config) -> Results:
        blocks = triton.cdiv(rows, config["BLOCK_N"])
        _transpose_kernel[(count * blocks, triton.cdiv(columns, config["BLOCK_K"]))](
            codes.view(torch.uint8), turned.view(torch.uint8), rows, columns, blocks, **config
        )
        return turned

    if codes.numel():
        launch(lookup("transpose", tuple(codes.shape), TRANSPOSE_CONFIGS, launch, small=TRANSPOSE_CONFIGS[0]))
    return turned


def dequantize_weights(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the values of contiguous codes [G, N, K] into contiguous out of that shape."""
    count, rows, columns = codes.shape
    row_blocks, column_blocks = scales.shape[1:]

    def launch(config: Config) -> Results:
        _dequantize_kernel[(count * row_blocks, column_blocks)](
            codes, scales, out, rows, columns, row_blocks, column_blocks, **config
        )
        return out

    if codes.numel():
        launch(lookup("dequantize_weights", tuple(codes.shape), DEQUANTIZE_CONFIGS, launch, small=SQUARE_SMALL))


def quantize_mx(x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and E8M0 scales [M, ceil(K/32)] of x [M, K]."""
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = x.new_empty(rows, triton.cdiv(columns, 32), dtype=torch.uint8)

    def launch(config: Config) -> Results:
        grid = (triton.cdiv(rows, config["BLOCK_M"]), triton.cdiv(columns, 128))
        _mx_kernel[grid](
            x,
            codes,
            scales,
            seed or 0,
            rows,
            columns,
            x.stride(0),
            x.stride(1),
            STOCHASTIC=seed is not None,
            **config,
        )
        return codes, scales

    if codes.numel():
        launch(lookup("quantize_mx", (rows, columns), ROW_CONFIGS, launch, small=ROW_CONFIGS[1]))
    return codes, scales


@triton.jit(do_not_specialize=["seed"])
def _rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    scale_column: tl.tensor,
    BLOCK_M: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows of one 128-wide block; a warp reads whole rows of it, 16 bytes a thread."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = to_float32(
        tl.load(x + row[:, None] * x_row + column[None, :].to(tl.int64) * x_column, mask=inside, other=0.0)
    )
    scale = block_scale(tl.max(magnitude_bits(values), axis=1), POWER_OF_TWO)
    random = uniforms(seed, row, block * BLOCK, columns, BLOCK_M, BLOCK) if STOCHASTIC else 0.0
    code = to_e4m3(quotient(values, scale[:, None]), random, STOCHASTIC)
    tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
    tl.store(scales + row + block.to(tl.int64) * scale_column, scale, mask=row < rows)


@triton.jit(do_not_specialize=["seed"])
def _both_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    codes_t: tl.tensor,
    scales_t: tl.tensor,
    seed: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    scale_column: tl.tensor,
    scale_t_column: tl.tensor,
    POWER_OF_TWO: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """One program: a 128x128 block, read once, kept in registers, scaled by its rows and by its columns."""
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    row = row_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = column_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = to_float32(tl.load(x + row[:, None] * x_row + column[None, :] * x_column, mask=inside, other=0.0))
    bits = magnitude_bits(values)
    random = uniforms(seed, row, column_block * BLOCK, columns, BLOCK, BLOCK) if STOCHASTIC else 0.0
    scale = block_scale(tl.max(bits, axis=1), POWER_OF_TWO)
    code = to_e4m3(quotient(values, scale[:, None]), random, STOCHASTIC)
    tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
    tl.store(scales + row + column_block.to(tl.int64) * scale_column, scale, mask=row < rows)
    scale_t = block_scale(tl.max(bits, axis=0), POWER_OF_TWO)
    code_t = to_e4m3(quotient(values, scale_t[None, :]), random, STOCHASTIC)
    tl.store(
        codes_t + column[:, None] * rows + row[None, :],
        tl.trans(code_t),
        mask=(column[:, None] < columns) & (row[None, :] < rows),
    )
    tl.store(scales_t + column + row_block.to(tl.int64) * scale_t_column, scale_t, mask=column < columns)


@triton.jit
def _weights_kernel(
    w: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_blocks: tl.tensor,
    column_blocks: tl.tensor,
    w_matrix: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """One program: a 128x128 block of one matrix under one scale."""
    matrix, row_block = (tl.program_id(0) // row_blocks).to(tl.int64), tl.program_id(0) % row_blocks
    column_block = tl.program_id(1)
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    column = column_block * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = matrix * w_matrix + row[:, None].to(tl.int64) * w_row + column[None, :].to(tl.int64) * w_column
    values = to_float32(tl.load(w + at, mask=inside, other=0.0))
    amax = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    scale = block_scale(tl.full((1, 1), 0, tl.int32) + amax, POWER_OF_TWO)
    code = to_e4m3(quotient(values, scale), 0.0, False)
    start = matrix * rows * columns
    tl.store(codes + start + row[:, None].to(tl.int64) * columns + column[None, :], code, mask=inside)
    first = matrix * row_blocks * column_blocks
    one = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]
    tl.store(scales + first + row_block * column_blocks + column_block + one, scale)


@triton.jit
def _dequantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_blocks: tl.tensor,
    column_blocks: tl.tensor,
) -> None:
    """One program: a 128x128 block of one matrix."""
    matrix, row_block = (tl.program_id(0) // row_blocks).to(tl.int64), tl.program_id(0) % row_blocks
    row = row_block * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = matrix * rows * columns + row[:, None].to(tl.int64) * columns + column[None, :]
    scale = tl.load(scales + (matrix * row_blocks + row_block) * column_blocks + tl.program_id(1))
    values = decode(tl.load(codes + at, mask=inside, other=0.0)) * scale
    tl.store(out + at, narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _transpose_kernel(
    codes: tl.tensor,
    turned: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    blocks: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: a tile of one matrix of bytes."""
    start = (tl.program_id(0) // blocks).to(tl.int64) * rows * columns
    row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = tl.load(
        codes + start + row[:, None].to(tl.int64) * columns + column[None, :],
        mask=(row[:, None] < rows) & (column[None, :] < columns),
        other=0,
    )
    tl.store(
        turned + start + column[:, None].to(tl.int64) * rows + row[None, :],
        tl.trans(tile),
        mask=(column[:, None] < columns) & (row[None, :] < rows),
    )


@triton.jit(do_not_specialize=["seed"])
def _mx_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    seed: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    BLOCK_M: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows of four 32-wide blocks."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    values = to_float32(
        tl.load(x + row[:, None] * x_row + column[None, :].to(tl.int64) * x_column, mask=inside, other=0.0)
    )
    parts = values.reshape(BLOCK_M, BLOCK // MX_BLOCK, MX_BLOCK)
    amax_bits = tl.max(magnitude_bits(parts), axis=2)
    exponent = _e8m0(amax_bits)
    inverse = tl.where(exponent == 255, 0x7FC00000, (254 - exponent) << 23).to(tl.int32).to(tl.float32, bitcast=True)
    scaled = (parts * inverse[:, :, None]).reshape(BLOCK_M, BLOCK)
    random = uniforms(seed, row, tl.program_id(1) * BLOCK, columns, BLOCK_M, BLOCK) if STOCHASTIC else 0.0
    code = to_e4m3(scaled, random, STOCHASTIC)
    tl.store(codes + row[:, None] * columns + column[None, :], code, mask=inside)
    part = tl.program_id(1) * (BLOCK // MX_BLOCK) + tl.arange(0, BLOCK // MX_BLOCK)
    blocks = tl.cdiv(columns, MX_BLOCK)
    kept = (row[:, None] < rows) & (part[None, :] < blocks)
    tl.store(scales + row[:, None] * blocks + part[None, :], exponent.to(tl.uint8), mask=kept)


@triton.jit
def _e8m0(amax_bits: tl.tensor) -> tl.tensor:
    """`quantize_reference.e8m0_scales`: the biased exponent of amax / 448 rounded up."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    bits = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)).to(tl.int32, bitcast=True)
    exponent = tl.where(bits <= 0x00400000, 0, (bits + 0x7FFFFF) >> 23)
    exponent = tl.where(amax_bits == 0, 127, exponent)
    return tl.where(amax_bits >= INFINITY_BITS, 255, exponent)
