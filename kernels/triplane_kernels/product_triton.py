"""Device functions of the matrix products: tiles by TMA descriptor or by pointer, and the product of two tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from triplane_kernels.narrow_triton import INTERPRETED
from triplane_kernels.rounding_triton import to_float32


@triton.jit
def product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """float32 x @ y of two tiles of one dtype, from a fresh accumulator.

    The interpreter multiplies raw bits of bfloat16 and drops FP8's NaN.
    """
    if INTERPRETED:
        x, y = decode(x), decode(y)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def tile(base: tl.tensor, row: tl.tensor, column: tl.tensor, row_stride: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The values at rows x columns by pointer, zero where not `inside`; the last dimension is contiguous."""
    return tl.load(base + row[:, None].to(tl.int64) * row_stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def place(
    within: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """First row and column of tile `within` of a grid of down x across: bands of BAND rows, each walked column by
    column.
    """
    band = within // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    rest = within - band * BAND * across
    return (band * BAND + rest % height) * BLOCK_M, rest // height * BLOCK_N


@triton.jit
def decode(values: tl.tensor) -> tl.tensor:
    """float32 of a tile; by bits under the interpreter, which drops FP8's NaN."""
    if INTERPRETED and values.dtype == tl.float8e4nv:
        code = values.to(tl.uint8, bitcast=True).to(tl.int32)
        magnitude = code & 0x7F
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        size = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        size = tl.where(magnitude == 0x7F, float("nan"), size)
        values = tl.where(code >= 0x80, -size, size)
    return to_float32(values)
