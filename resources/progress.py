"""Progress of long steps, for terminal bars, a log, or no display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """Progress of one step."""

    asset: str
    """E.g. "rollouts"."""
    partition: str | None
    """Iteration key such as "0003", or None for unpartitioned assets."""
    phase: str
    """Current activity, in a word or two."""
    done: float
    """Units finished."""
    total: float | None
    """Total units; None if unknown."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Current measurements, e.g. {"tokens_per_second": 6100.0}."""


class ProgressSink(Protocol):
    """Protocol: receives every update, several a second, and must return at once."""

    def __call__(self, update: Progress) -> None:
        """Show, log or drop the update."""


def no_progress(update: Progress) -> None:
    """Sink that drops updates; Dagster still records its own observations."""
