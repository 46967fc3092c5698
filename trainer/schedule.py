"""Learning-rate schedules."""

from __future__ import annotations


def warmup(step: int, warmup_steps: int) -> float:
    """Factor on the learning rate at `step` (from 0): linear to 1, then constant, so that a run has no length to know
    beforehand.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))
