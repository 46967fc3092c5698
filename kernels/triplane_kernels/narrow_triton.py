"""The cast to what kernels store, equal on a GPU and under Triton's interpreter.

The interpreter truncates float32 to bfloat16 and loses denormal numbers; so there, and only there, bits are moved by
hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triplane_kernels.machine import machine

INTERPRETED = tl.constexpr(machine().interpreter)


@triton.jit
def narrow(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 values in `dtype` (float32, bfloat16 or float16), rounded to nearest even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        values = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)
