"""Health of a replica, by probes and by the faults of requests, and which of a fleet are ejected.

away      nobody accepts connections: no request is sent until a probe finds it well
faulty    it accepts connections and fails: ejected until a probe finds it well, at the earliest after a pause that
          grows with each fault of requests. At most half of a fleet is ejected, never the last: the others that fail
          are still asked, since a fault that most have is rarely theirs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from contracts.retries import backoff_s

PAUSE_S, LONGEST_S = 1.0, 60.0
"""Pause of a replica after its first fault of a request, and the longest one, in seconds."""


@dataclass
class Health:
    """What is known of one replica."""

    clock: Callable[[], float] = time.monotonic
    fault: str | None = "it was not asked yet"
    """Why it is not well, or None."""
    away: bool = True
    since: float = 0.0
    """When the fault began."""
    _failures: int = field(default=0, init=False)
    _due: float = field(default=0.0, init=False)

    def well(self) -> bool:
        """A probe found it well. Returns whether it is so from now on, and was not before."""
        if self.fault is None or self.clock() < self._due:
            return False
        self.fault, self.away = None, False
        return True

    def answered(self) -> None:
        """A request was answered."""
        self._failures = 0

    def failed(self, fault: str, *, away: bool, request: bool) -> bool:
        """A probe or a request failed. away: nobody accepted the connection. Returns whether that is news."""
        news = self.fault is None or (away and not self.away)
        if self.fault is None:
            self.since = self.clock()
        if request:
            self._failures += 1
            self._due = self.clock() + backoff_s(self._failures, PAUSE_S, LONGEST_S)
        self.fault = fault
        self.away = self.away or away
        return news


def ejected(present: Iterable[tuple[str, Health]]) -> set[str]:
    """Names of the replicas to eject, those that have failed for longest first."""
    found = list(present)
    faulty = sorted((health.since, name) for name, health in found if health.fault is not None)
    return {name for _, name in faulty[: len(found) // 2]}
