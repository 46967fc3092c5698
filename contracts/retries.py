"""Pauses between retries."""

from __future__ import annotations

import math
import random

_DOUBLINGS = 64
"""Further ones would exceed a float after some days of failures."""


def backoff_s(failures: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait after the `failures`-th failure in a row, from 1.

    On average `first_s` after the first failure, doubled after each further one, at most `longest_s`. A jitter of half
    the pause spreads the retries of clients that failed together.
    """
    doubled = 2.0 ** min(failures - 1, _DOUBLINGS)
    return min(longest_s, first_s * doubled * random.uniform(0.5, 1.5))
