"""Learning-rate schedules."""

from __future__ import annotations


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate at `step` (from 0): linear to 1, then constant, independent of the length of the
    run.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))
