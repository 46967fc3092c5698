"""Norm and rotation in Triton: each row is read once, and its float32 values stay in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triplane_kernels.machine import machine
from triplane_kernels.narrow_triton import narrow
from triplane_kernels.rounding_triton import rounded, to_float32
from triplane_kernels.tuning import Config, Results, lookup

SMALL: Config = {"VALUES": 1024, "num_warps": 4, "num_stages": 1}
CANDIDATES: list[Config] = [
    {"VALUES": values, "num_warps": warps, "num_stages": 1}
    for values, warps in ((2048, 4), (4096, 8), (4096, 4), (8192, 8), (8192, 4))
]
"""VALUES: those that a program holds at a time, at least one row."""
PROGRAMS = 8
"""Programs of the backward pass for each multiprocessor: each sums the weight's gradient over its rows."""


@triton.jit
def _inverse(values: tl.tensor, columns: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return tl.rsqrt(tl.sum(values * values, axis=1) / columns + eps)[:, None]


@triton.jit
def _forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    columns: tl.tensor,
    eps: tl.tensor,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None] * columns + column[None, :]
    values = to_float32(tl.load(x + at, mask=inside, other=0.0))
    dtype = x.dtype.element_ty
    if NORM:
        inverse = _inverse(values, columns, eps)
        scale = to_float32(tl.load(weight + column, mask=column < columns, other=0.0))
        values = rounded(values * inverse, dtype) * scale[None, :]
    if ROTATE:
        half = columns // 2
        partner = tl.where(column < half, column + half, column - half)
        other = to_float32(tl.load(x + row[:, None] * columns + partner[None, :], mask=inside, other=0.0))
        if NORM:
            of_partner = to_float32(tl.load(weight + partner, mask=column < columns, other=0.0))
            other = rounded(rounded(other * inverse, dtype) * of_partner[None, :], dtype)
            values = rounded(values, dtype)
        angle = (row // heads)[:, None] * columns + column[None, :]
        turned = tl.where(column[None, :] < half, -other, other)
        values = rounded(values * rounded(tl.load(cosine + angle, mask=inside, other=0.0), dtype), dtype)
        values += rounded(turned * rounded(tl.load(sine + angle, mask=inside, other=0.0), dtype), dtype)
    tl.store(out + at, narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gradient: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    out: tl.tensor,
    of_weight: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    columns: tl.tensor,
    eps: tl.tensor,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """of_weight: float32 [programs, columns], the part of each program."""
    column = tl.arange(0, BLOCK_N)
    half = columns // 2
    partner = tl.where(column < half, column + half, column - half)
    total = tl.zeros((BLOCK_N,), tl.float32)
    dtype = x.dtype.element_ty
    for first in range(tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        at = row[:, None] * columns + column[None, :]
        slope = to_float32(tl.load(gradient + at, mask=inside, other=0.0))
        if ROTATE:
            token = (row // heads)[:, None] * columns
            other = to_float32(tl.load(gradient + row[:, None] * columns + partner[None, :], mask=inside, other=0.0))
            other *= rounded(tl.load(sine + token + partner[None, :], mask=inside, other=0.0), dtype)
            slope = slope * rounded(tl.load(cosine + token + column[None, :], mask=inside, other=0.0), dtype)
            slope += tl.where(column[None, :] < half, other, -other)
        if NORM:
            values = to_float32(tl.load(x + at, mask=inside, other=0.0))
            inverse = _inverse(values, columns, eps)
            # rows past the end are zeros, whose inverse is infinite without eps
            values = tl.where(inside, values * inverse, 0.0)
            total += tl.sum(slope * rounded(values, dtype), axis=0)
            slope *= to_float32(tl.load(weight + column, mask=column < columns, other=0.0))[None, :]
            slope = inverse * (slope - values * (tl.sum(slope * values, axis=1) / columns)[:, None])
        tl.store(out + at, narrow(slope, out.dtype.element_ty), mask=inside)
    if NORM:
        tl.store(of_weight + tl.program_id(0) * columns + column, total, mask=column < columns)


def rms_norm(x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float) -> Tensor:
    """As `norm_reference.rms_norm`."""
    rows, columns, heads = _sizes(x)
    out = torch.empty_like(x)

    def run(config: Config) -> Tensor:
        tile = _tile(config, columns)
        _forward_kernel[(triton.cdiv(rows, tile["BLOCK_M"]),)](
            x,
            x if weight is None else weight,
            *_angles(x, cosine, sine),
            out,
            rows,
            heads,
            columns,
            eps,
            NORM=weight is not None,
            ROTATE=cosine is not None,
            **tile,
        )
        return out

    if out.numel():
        run(lookup("rms_norm", (rows, columns), CANDIDATES, run, small=SMALL))
    return out


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As `norm_reference.rms_norm_backward`."""
    rows, columns, heads = _sizes(x)
    out = torch.empty_like(x)
    of_weight = x.new_zeros(0 if weight is None else columns, dtype=torch.float32)

    def run(config: Config) -> Results:
        tile = _tile(config, columns)
        programs = min(triton.cdiv(rows, tile["BLOCK_M"]), PROGRAMS * machine().multiprocessors)
        # of this launch alone: a search launches configurations with other numbers of programs before it
        parts = of_weight.new_empty(programs, *of_weight.shape)
        _backward_kernel[(programs,)](
            gradient,
            x,
            x if weight is None else weight,
            *_angles(x, cosine, sine),
            out,
            parts,
            rows,
            heads,
            columns,
            eps,
            NORM=weight is not None,
            ROTATE=cosine is not None,
            **tile,
        )
        torch.sum(parts, 0, out=of_weight)
        return out, of_weight

    if out.numel():
        run(lookup("rms_norm_backward", (rows, columns), CANDIDATES, run, small=SMALL))
    return out, of_weight


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Rows, columns, and rows of a token."""
    columns = x.shape[-1]
    return x.numel() // columns, columns, x.shape[1] if x.dim() == 3 else 1


def _angles(x: Tensor, cosine: Tensor | None, sine: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous cosine and sine, or a stand-in that is not read."""
    return (x, x) if cosine is None or sine is None else (cosine.contiguous(), sine.contiguous())


def _tile(config: Config, columns: int) -> Config:
    across = triton.next_power_of_2(columns)
    tile = {key: value for key, value in config.items() if key != "VALUES"}
    return tile | {"BLOCK_M": max(1, config["VALUES"] // across), "BLOCK_N": across}
