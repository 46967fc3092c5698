"""SwiGLU in Triton, alone and fused with quantization: each input is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.narrow_triton import narrow
from triplane_kernels.rounding_triton import block_scale, magnitude_bits, quotient, rounded, to_e4m3, to_float32
from triplane_kernels.tuning import Config, Results, lookup

BLOCK = tl.constexpr(128)
SMALL: Config = {"BLOCK_M": 64, "BLOCK_F": 128, "num_warps": 4, "num_stages": 1}
CANDIDATES: list[Config] = [
    {"BLOCK_M": rows, "BLOCK_F": columns, "num_warps": warps, "num_stages": 1}
    for rows, columns, warps in (
        (4, 512, 4),
        (4, 512, 8),
        (1, 1024, 4),
        (2, 1024, 4),
        (2, 1024, 8),
        (8, 256, 4),
        (4, 1024, 8),
    )
]
ROW_SMALL: Config = {"BLOCK_M": 64, "num_warps": 4, "num_stages": 1}
ROW_CANDIDATES: list[Config] = [
    {"BLOCK_M": rows, "num_warps": warps, "num_stages": 1}
    for rows, warps in ((16, 4), (32, 4), (8, 2), (16, 2), (64, 8))
]


@triton.jit
def _at(base: tl.tensor, row: tl.tensor, column: tl.tensor, width: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """float32 values of a matrix `width` wide at row [M] and column [N]; zeros outside."""
    return to_float32(tl.load(base + row[:, None] * width + column[None, :], mask=inside, other=0.0))


@triton.jit
def _gate_slope(gradient: tl.tensor, gate: tl.tensor, up: tl.tensor, sigmoid: tl.tensor) -> tl.tensor:
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _quantize(values: tl.tensor, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """Codes and row scales of a tile one block wide, as `quantize_activations` computes them."""
    scale = block_scale(tl.max(magnitude_bits(values), axis=1), POWER_OF_TWO)
    return to_e4m3(quotient(values, scale[:, None]), 0.0, False), scale


@triton.jit
def _forward_kernel(
    gate_up: tl.tensor, out: tl.tensor, rows: tl.tensor, width: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    gate = _at(gate_up, row, column, 2 * width, inside)
    up = _at(gate_up, row, column + width, 2 * width, inside)
    values = rounded(gate * tl.sigmoid(gate), out.dtype.element_ty) * up
    tl.store(out + row[:, None] * width + column[None, :], narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gradient: tl.tensor,
    gate_up: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    slope = _at(gradient, row, column, width, inside)
    gate = _at(gate_up, row, column, 2 * width, inside)
    up = _at(gate_up, row, column + width, 2 * width, inside)
    sigmoid = tl.sigmoid(gate)
    at = out + row[:, None] * (2 * width) + column[None, :]
    tl.store(at, narrow(_gate_slope(slope, gate, up, sigmoid), out.dtype.element_ty), mask=inside)
    of_up = slope * rounded(gate * sigmoid, out.dtype.element_ty)
    tl.store(at + width, narrow(of_up, out.dtype.element_ty), mask=inside)


@triton.jit
def _forward_quantized_kernel(
    gate_up: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    scale_column: tl.tensor,
    BLOCK_M: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows of one block of 128 columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    gate = _at(gate_up, row, column, 2 * width, inside)
    up = _at(gate_up, row, column + width, 2 * width, inside)
    dtype = gate_up.dtype.element_ty
    values = rounded(rounded(gate * tl.sigmoid(gate), dtype) * up, dtype)
    code, scale = _quantize(values, POWER_OF_TWO)
    tl.store(codes + row[:, None] * width + column[None, :], code, mask=inside)
    tl.store(scales + row + block.to(tl.int64) * scale_column, scale, mask=row < rows)


@triton.jit
def _backward_quantized_kernel(
    gradient: tl.tensor,
    gate_up: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    scale_column: tl.tensor,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """One program: BLOCK_M rows of a block of gate and the block of up beside it; ALIGNED when no block holds parts of
    both.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = row < rows
    # The column of the output, of gate and of the gradient that belongs to a column of gate_up.
    inner = column if ALIGNED else column % width
    inside = known[:, None] & (column[None, :] < (width if ALIGNED else 2 * width))
    slope = _at(gradient, row, inner, width, inside)
    gate = _at(gate_up, row, inner, 2 * width, inside)
    up = _at(gate_up, row, inner + width, 2 * width, inside)
    sigmoid = tl.sigmoid(gate)
    values = _gate_slope(slope, gate, up, sigmoid)
    of_up = slope * rounded(gate * sigmoid, out.dtype.element_ty)
    if not ALIGNED:
        values = tl.where(column[None, :] < width, values, of_up)
    at = row[:, None] * (2 * width) + column[None, :]
    code, scale = _quantize(values, POWER_OF_TWO)
    tl.store(out + at, narrow(values, out.dtype.element_ty), mask=inside)
    tl.store(codes + at, code, mask=inside)
    tl.store(scales + row + block * scale_column, scale, mask=known)
    if ALIGNED:
        code, scale = _quantize(of_up, POWER_OF_TWO)
        tl.store(out + at + width, narrow(of_up, out.dtype.element_ty), mask=inside)
        tl.store(codes + at + width, code, mask=inside)
        tl.store(scales + row + (block + width // BLOCK) * scale_column, scale, mask=known)


def swiglu(gate_up: Tensor) -> Tensor:
    """As `swiglu_reference.swiglu`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)

    def run(config: Config) -> Tensor:
        _forward_kernel[_tiles(rows, width, config)](gate_up, out, rows, width, **config)
        return out

    if out.numel():
        run(lookup("swiglu", (rows, width), CANDIDATES, run, small=SMALL))
    return out


def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """As `swiglu_reference.swiglu_backward`."""
    rows, width = gradient.shape
    out = torch.empty_like(gate_up)

    def run(config: Config) -> Tensor:
        _backward_kernel[_tiles(rows, width, config)](gradient, gate_up, out, rows, width, **config)
        return out

    if out.numel():
        run(lookup("swiglu_backward", (rows, width), CANDIDATES, run, small=SMALL))
    return out


def swiglu_quantized(gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """As `swiglu_reference.swiglu_quantized`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes = gate_up.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty(triton.cdiv(width, 128), rows, dtype=torch.float32).t()

    def run(config: Config) -> Results:
        _forward_quantized_kernel[triton.cdiv(rows, config["BLOCK_M"]), scales.shape[1]](
            gate_up,
            codes,
            scales,
            rows,
            width,
            scales.stride(1),
            POWER_OF_TWO=power_of_two,
            **config,
        )
        return codes, scales

    if codes.numel():
        run(lookup("swiglu_quantized", (rows, width), ROW_CANDIDATES, run, small=ROW_SMALL))
    return codes, scales


def swiglu_backward_quantized(gradient: Tensor, gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `swiglu_reference.swiglu_backward_quantized`."""
    rows, width = gradient.shape
    aligned = width % 128 == 0
    out, codes = torch.empty_like(gate_up), torch.empty_like(gate_up, dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty(triton.cdiv(2 * width, 128), rows, dtype=torch.float32).t()

    def run(config: Config) -> Results:
        blocks = scales.shape[1] // 2 if aligned else scales.shape[1]
        _backward_quantized_kernel[triton.cdiv(rows, config["BLOCK_M"]), blocks](
            gradient,
            gate_up,
            out,
            codes,
            scales,
            rows,
            width,
            scales.stride(1),
            ALIGNED=aligned,
            POWER_OF_TWO=power_of_two,
            **config,
        )
        return out, codes, scales

    if codes.numel():
        run(lookup("swiglu_backward_quantized", (rows, width), ROW_CANDIDATES, run, small=ROW_SMALL))
    return out, codes, scales


def _tiles(rows: int, width: int, config: Config) -> tuple[int, int]:
    return triton.cdiv(rows, config["BLOCK_M"]), triton.cdiv(width, config["BLOCK_F"])
