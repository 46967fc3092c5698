"""Pauses between retries."""

from __future__ import annotations

import math
import random


def backoff_s(failures: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait after the `failures`-th failure in a row, from 1.

    On average `first_s` after the first failure, doubled after each further one, at most `longest_s`. A jitter of half
    the pause spreads the retries of clients that failed together.
    """
    return min(longest_s, first_s * 2.0 ** (failures - 1) * random.uniform(0.5, 1.5))
