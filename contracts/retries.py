"""Pauses between retries."""

from __future__ import annotations

import math
import random


def backoff_s(failures: int, first_s: float, longest_s: float = math.inf) -> float:
    """Seconds to wait after the `failures`-th failure in a row, from 1.

    `first_s` on average after the first, doubling with each, jittered by half so that clients that failed together do
    not return together; at most `longest_s`.
    """
    return min(longest_s, first_s * 2.0 ** (failures - 1) * random.uniform(0.5, 1.5))
