"""Make torch's CPU math reproducible to the bit from the first call on."""

from __future__ import annotations

import torch

_UNARY = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.expm1,
    torch.log,
    torch.log10,
    torch.log1p,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
)
"""Functions that torch computes with MKL's vector library."""


def resolve_kernels() -> None:
    """Call each of MKL's vector functions once, in this thread alone. Takes a millisecond.

    MKL chooses the kernel of a function at its first call. If several threads make that call concurrently, one of them
    may once compute its share with a kernel of half the precision: errors near 1e-4 that do not repeat (pytorch issue
    188792; oneMKL below 2025.0).
    """
    for dtype in (torch.float32, torch.float64):
        few = torch.full((8,), 0.5, dtype=dtype)
        for function in _UNARY:
            function(few)
