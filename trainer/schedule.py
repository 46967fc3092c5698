"""Learning-rate schedules. Importing this needs no torch."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]
"""Course of the learning rate after the warmup: constant, or falling in a line or in half a cosine (arXiv:1608.03983,
equation 5, without restarts).
"""


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate at `step` (from 0): linear up to 1, then constant, independent of the run's
    length.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))


def rate_factor(schedule: Schedule, step: int, warmup_steps: int, end: int, final: float) -> float:
    """Factor of the learning rate at `step` (from 0).

    end: step from which the factor is `final`, unless the schedule is constant.
    """
    if schedule == "constant" or step < warmup_steps:
        return warmup(step, warmup_steps)
    done = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return final + (1.0 - final) * left
