"""Timing helpers shared by all benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile of `values`, by linear interpolation.

    Raises ValueError if `values` is empty.
    """
    if not values:
        raise ValueError("no values to take a percentile of: measure at least once")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def seconds_of(work: Callable[[], object], *, repeats: int, warmups: int = 1) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after `warmups` calls that do not count."""
    for _ in range(warmups):
        work()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found


async def seconds_awaited(work: Callable[[], Awaitable[object]], *, repeats: int, warmups: int = 1) -> list[float]:
    """Like `seconds_of`, for a coroutine function."""
    for _ in range(warmups):
        await work()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await work()
        found.append(time.perf_counter() - begin)
    return found


def resident(name: str) -> int:
    """Bytes of a line of this process's status: VmRSS, resident now, or VmHWM, at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
