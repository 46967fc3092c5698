"""Compare the numbers in two tensors, regardless of the order that a kernel requires."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 24
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd 64-bit constants of splitmix64's finalizer."""


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """(count, sum of hashes) of the elements that are not +0: equal for all permutations and any padding with zeros;
    different for other numbers, except with probability 2^-64.
    """
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    count, total = 0, 0
    for start in range(0, len(bits), _CHUNK):
        part = bits[start : start + _CHUNK]
        wide = part[part != 0].to(torch.int64)
        for factor in _FACTORS:
            wide = wide * factor
            wide = wide ^ (wide >> 29)
        count += len(wide)
        total += int(wide.sum())
    return count, total & (2**64 - 1)


def same_numbers(served: Tensor, expected: Tensor) -> bool:
    """Whether `served` is a permutation of `expected`, zeros aside, after a cast to its type."""
    return fingerprint(served) == fingerprint(expected.to(served.dtype))
