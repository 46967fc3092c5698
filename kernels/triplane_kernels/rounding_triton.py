"""Device functions shared by the kernels: block scales, rounding to float8_e4m3fn, Philox uniforms. Bit for bit what
`blockwise` and `rounding` give.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triplane_kernels.narrow_triton import INTERPRETED, narrow

E4M3_MAX = tl.constexpr(448.0)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def to_float32(values: tl.tensor) -> tl.tensor:
    """float32 of bfloat16 or float32. By bits, since the interpreter's cast loses denormal numbers."""
    if values.dtype == tl.bfloat16:
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def rounded(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 values, rounded to `dtype` (float32, bfloat16 or float16), as float32."""
    return to_float32(narrow(values, dtype))


@triton.jit
def magnitude_bits(values: tl.tensor) -> tl.tensor:
    """|values|, float32, as the int32 of its bits: integer maxima order them and keep infinity and NaN, which float
    maxima drop.
    """
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax_bits: tl.tensor, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """`blockwise.block_scales` of the float32 whose bits are given."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    smallest = tl.full(amax.shape, 0x00800000, tl.int32).to(tl.float32, bitcast=True)
    scale = tl.where(scale < smallest, smallest, scale)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(amax_bits < INFINITY_BITS, bits.to(tl.float32, bitcast=True), scale)
    return tl.where(amax_bits == 0, 1.0, scale)


@triton.jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """1 / scale, rounded to nearest."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def quotient(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """values [M, N] / scale [1, 1], [M, 1] or [1, N] as the cast to e4m3 sees it: rounded to nearest but for quotients
    below 2^-30, which all become zeros.

    The recipes divide: a product with the reciprocal rounds some values to another code. One reciprocal of each scale
    and two corrections by exact remainders (Markstein, IBM J. Res. Dev. 34(1), 1990); the division instruction takes
    three times as long for each value. Zeros keep their sign. The interpreter, which does not fuse multiply and add,
    divides.
    """
    if INTERPRETED:
        found = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    else:
        # remainders of small numbers need bits that float32 lacks below 2^-149
        lift = tl.where(scale < 5.421010862427522e-20, 18446744073709551616.0, 1.0)
        divisor = scale * lift
        inverse = reciprocal(divisor)
        # infinity times an inverse of zero is NaN, but finite values over infinity are zeros
        minus = tl.where(divisor < float("inf"), -divisor, 0.0)
        values = values * lift
        first = values * inverse
        found = first
        for _ in tl.static_range(2):
            found = tl.fma(tl.fma(found, minus, values), inverse, found)
        sign = first.to(tl.int32, bitcast=True) & -2147483648
        found = ((found.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)
    return found


@triton.jit
def to_e4m3(scaled: tl.tensor, random: tl.tensor, STOCHASTIC: tl.constexpr) -> tl.tensor:
    """`rounding.to_e4m3`.

    The GPU's cast clamps, rounds to nearest even and keeps NaN; the interpreter's does none of that rightly.
    """
    if STOCHASTIC:
        scaled = _stochastic(_clamp(scaled), random)
    if INTERPRETED:  # noqa: SIM108  both branches compile in a conditional expression
        code = _encode(_nearest_even(_clamp(scaled)))
    else:
        code = scaled.to(tl.float8e4nv)
    return code


@triton.jit
def _clamp(values: tl.tensor) -> tl.tensor:
    """To +-448; NaN fails both comparisons and stays."""
    return tl.where(values > E4M3_MAX, E4M3_MAX, tl.where(values < -E4M3_MAX, -E4M3_MAX, values))


@triton.jit
def _nearest_even(values: tl.tensor) -> tl.tensor:
    bits = values.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    # float32 has steps of 2^-9 from 2^14 on: the addition rounds to a subnormal code's step, ties to even
    subnormal = (size + 16384.0) - 16384.0
    subnormal = tl.where(bits < 0, -subnormal, subnormal)
    return tl.where(size < 0.015625, subnormal, tl.where(size <= E4M3_MAX, normal, values))


@triton.jit
def _encode(codes: tl.tensor) -> tl.tensor:
    """float8_e4m3fn of float32 values that are codes, or NaN, from their bits."""
    bits = codes.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    subnormal = (tl.where(size < 0.015625, size, 0.0) * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, subnormal, (magnitude >> 20) - (120 << 3))
    code = tl.where(magnitude > INFINITY_BITS, 0x7F, code) | ((bits >> 24) & 0x80)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _stochastic(values: tl.tensor, random: tl.tensor) -> tl.tensor:
    bits = values.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # biased exponent of the step, 2^(exponent - 3), not below 2^-9; its inverse has the exponent 254 minus it
    step = tl.maximum((bits >> 23) & 0xFF, 121) - 3
    steps = size * ((254 - step) << 23).to(tl.float32, bitcast=True)
    whole = tl.floor(steps)
    rounded = (whole + tl.where(random < steps - whole, 1.0, 0.0)) * (step << 23).to(tl.float32, bitcast=True)
    return tl.where(size <= E4M3_MAX, tl.where(bits < 0, -rounded, rounded), values)


@triton.jit
def uniforms(
    seed: tl.tensor,
    row: tl.tensor,
    first_column: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """`rounding.uniforms` of the rows `row` [ROWS] and of COLUMNS columns from `first_column`, a multiple of 4, of a
    matrix `columns` wide.
    """
    quad = (first_column + tl.arange(0, COLUMNS // 4) * 4) // 4
    counter = row.to(tl.int64)[:, None] * ((columns + 3) // 4) + quad[None, :]
    first, second, third, fourth = tl.randint4x(seed, counter)
    words = tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(ROWS, COLUMNS)
    return (words.to(tl.uint32) >> 8).to(tl.float32) * 5.9604644775390625e-08
