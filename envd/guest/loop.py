"""The Python agent's event loop: descriptors and timers, one thread, nothing else."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Timer:
    """A call at a time."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call."""
        self.call = None


class Loop:
    """Calls back when a descriptor is ready or a time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = itertools.count()
        self._running = False

    def watch(self, fd: int, call: Callable[[], None], events: int = READ) -> None:
        """Call when the descriptor is ready. Once more for the same descriptor: with other events or another call."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, events, call)
        else:
            self._selector.register(fd, events, call)

    def unwatch(self, fd: int) -> None:
        """Do not call any more. To be called before the descriptor is closed."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call once, later."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), timer))
        return timer

    def run(self) -> None:
        """Run until `stop`."""
        self._running = True
        while self._is_running():
            for key, _ in self._selector.select(self._until_next()):
                if key.fd in self._selector.get_map():  # another's call may have let go of it
                    key.data()
                if not self._is_running():
                    return
            while self._timers and self._timers[0][0] <= time.monotonic():
                _, _, timer = heapq.heappop(self._timers)
                if timer.call is not None:
                    timer.call()

    def stop(self) -> None:
        """Have `run` return."""
        self._running = False

    def _is_running(self) -> bool:
        return self._running

    def _until_next(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())
