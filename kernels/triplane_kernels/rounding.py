"""Rounding to float8_e4m3fn in torch: to nearest even, or stochastically by a counter-based generator. Triton's twin is
`rounding_triton`.

A stochastic result depends on (seed, row, column) alone: the same on every device, whatever the launch shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
PHILOX_ROUNDS = 10
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def to_e4m3(scaled: Tensor, random: Tensor | None = None) -> Tensor:
    """float8_e4m3fn codes of `scaled` (float32 or float64, any shape): clamped to +-448, NaN stays NaN.

    random: uniform numbers in [0, 1) of that shape; with them a value between two codes is rounded up with the
    probability for which the expectation equals the value. Without them: to nearest, ties to even.
    """
    clamped = scaled.clamp(-E4M3_MAX, E4M3_MAX)
    if random is not None:
        steps = clamped.abs() / _step(clamped)
        whole = steps.floor()
        clamped = torch.copysign((whole + (random < steps - whole)) * _step(clamped), clamped)
    return clamped.to(torch.float8_e4m3fn)


def _step(values: Tensor) -> Tensor:
    """Distance of adjacent codes at `values`: 2^(exponent - 3), and 2^-9 below the smallest normal code 2^-6."""
    _, exponent = torch.frexp(values)
    return power_of_two(exponent.clamp(min=-5) - 4, values.dtype)


def power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponents (integers from -1022 to 1023) in `dtype`, by bits: `torch.ldexp` computes a power, which a GPU may
    round incorrectly.
    """
    return ((exponents.long() + 1023) << 52).view(torch.float64).to(dtype)


def uniforms(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """[rows, columns] float32 in [0, 1), multiples of 2^-24.

    Element (row, column) is word `column % 4` of Philox 4x32-10 (Salmon et al., SC 2011) at counter row * ceil(columns
    / 4) + column // 4, under the 64-bit key `seed`.
    """
    quads = -(-columns // 4)
    counters = torch.arange(rows * quads, dtype=torch.int64, device=device)
    words = torch.stack(philox(counters, seed), dim=-1).view(rows, 4 * quads)[:, :columns]
    return (words >> 8).to(torch.float32) * 2.0**-24


def philox(counters: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words, as int64, of Philox 4x32-10 at each 64-bit counter; int64 products wrap, so their high
    halves are exact.
    """
    words = [counters & _MASK, (counters >> 32) & _MASK, torch.zeros_like(counters), torch.zeros_like(counters)]
    low, high = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(PHILOX_ROUNDS):
        first, third = words[0] * _ROUND_A, words[2] * _ROUND_B
        words = [
            ((third >> 32) & _MASK) ^ words[1] ^ low,
            third & _MASK,
            ((first >> 32) & _MASK) ^ words[3] ^ high,
            first & _MASK,
        ]
        low, high = (low + _KEY_A) & _MASK, (high + _KEY_B) & _MASK
    return words[0], words[1], words[2], words[3]
