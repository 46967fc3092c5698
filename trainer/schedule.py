"""Learning-rate schedules."""

from __future__ import annotations


def warmup(step: int, warmup_steps: int) -> float:
    """Factor of the learning rate at `step` (from 0): linear up to 1, then constant, independent of the run's
    length.
    """
    return min(1.0, (step + 1) / (warmup_steps + 1))


def decay(step: int, start: int, end: int) -> float:
    """Factor of the learning rate at `step`: 1 before `start`, then linear, 0 at `end`."""
    return min(1.0, (end - step) / (end - start)) if end > start else 1.0
