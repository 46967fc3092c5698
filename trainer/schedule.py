"""Learning-rate schedules."""

from __future__ import annotations


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate at `step` (from 0): linear up to 1, then constant, independent of the run's
    length.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))
