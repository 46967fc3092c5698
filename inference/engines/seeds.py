"""Seeds of requests, for servers whose random numbers count from a request's first token."""

from __future__ import annotations

import hashlib

SEED_BITS = (1 << 63) - 1
"""Servers accept only signed 64-bit seeds."""


def mixed_seed(seed: int, position: int) -> int:
    """Seed of a request whose prompt has `position` tokens: each turn of an episode needs another one."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & SEED_BITS
