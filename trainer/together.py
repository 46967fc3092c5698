"""Work that takes the ranks of a job unlike times: they report to each other meanwhile, so that a rank which is only
slower is told from one that is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from contracts.rank_parts import POLL_S
from trainer.errors import RanksLost
from trainer.ranks import Ranks

_FIRST_POLL_S = 0.02
_TOLD_S = 3 * POLL_S
"""Longest that a rank that failed waits for the others to hear of it, in seconds: the exchange that runs, the one with
the failure, and a margin.
"""
_BUSY, _DONE, _FAILED = "busy", "done", "failed: "


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """End this block when every rank has ended its own. Every rank must enter it, and not use `aside` in it.

    A rank may take any time, but its process must answer. Raises RanksLost at the end of the block if another rank
    failed, ended or did not answer.
    """
    if ranks.count == 1:
        yield
        return
    reports = _Reports(ranks)
    reports.start()
    try:
        yield
        reports.end(_DONE)
        reports.over.wait()
    except BaseException as error:
        reports.end(f"{_FAILED}{error}")
        # torch aborts a process that ends in an exchange; the other ranks may be gone, though
        reports.over.wait(_TOLD_S)
        raise
    if reports.error is not None:
        raise reports.error


class _Reports(threading.Thread):
    """Tells the other ranks that this one works, until all have ended or one has failed."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(name="rank-reports", daemon=True)
        self._ranks, self._state, self._ended = ranks, _BUSY, threading.Event()
        self.over = threading.Event()
        """Set after the last exchange. Unlike `join`, a wait for it may be interrupted by a signal and repeated."""
        self.error: Exception | None = None

    def end(self, state: str) -> None:
        """Report this state from now on."""
        self._state = state
        self._ended.set()

    def run(self) -> None:
        poll_s, every = _FIRST_POLL_S, [_BUSY]
        while _BUSY in every and self.error is None:
            self._ended.wait(poll_s)
            poll_s = min(2 * poll_s, POLL_S)
            try:
                every = self._ranks.aside.exchange(self._state)
                for rank, state in enumerate(every):
                    if state.startswith(_FAILED):
                        raise RanksLost(self._ranks.rank, self._ranks.count, f"rank {rank} {state}")
            except Exception as error:  # noqa: BLE001 - `together` raises it in the thread that trains
                self.error = error
        self.over.set()
