"""Routed experts of a token sequence: which experts the sampler's routers chose at each position.

A record has the shape [recorded, layers, experts_per_token]. Row p holds the choices of the forward pass that was fed
token p, which predicts token p + 1. It covers the first `recorded` positions. The last sampled token of an episode is
never fed, so a record is at least one position shorter than its sequence. The experts of a position are in the order of
falling probability, which no reader depends on.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

from contracts.errors import SchemaError

Routes = npt.NDArray[np.unsignedinteger]
"""uint8 or uint16 [recorded, layers, experts_per_token]."""


def routes_dtype(experts: int) -> np.dtype[np.unsignedinteger]:
    """Smallest dtype of the ids of `experts` experts: uint8 up to 256, else uint16."""
    return np.dtype(np.uint8 if experts <= 256 else np.uint16)


def encode_routes(routes: Routes) -> bytes:
    """Content of the column `routed_experts`: a NumPy file (`.npy`, format 1.0) in C order."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(routes), version=(1, 0), allow_pickle=False)
    return out.getvalue()


def decode_routes(data: bytes) -> Routes:
    """Inverse of `encode_routes`. Also reads wider integers, which engines return.

    Raises SchemaError for anything but a three-dimensional array of integers in [0, 65535].
    """
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise SchemaError(f"routed experts are not a NumPy array ({error}): record them again") from None
    if not isinstance(found, np.ndarray) or found.ndim != 3 or found.dtype.kind not in "iu":
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "an archive"
        raise SchemaError(f"routed experts are {kind}, not integers [positions, layers, experts]: record them again")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) <= np.iinfo(np.uint16).max:
        raise SchemaError(f"routed experts range from {found.min()} to {found.max()}: ids lie in [0, 65535]")
    return found.astype(routes_dtype(int(found.max(initial=0)) + 1))
