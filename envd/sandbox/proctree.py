"""Find the processes below an agent, and kill those that one call started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path


def descendants(pid: int) -> dict[int, int]:
    """Parents of all live processes below pid, by process.

    Orphans count as children of their new parent: init or a subreaper.
    """
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - hot, and pathlib is slow
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - hot, and pathlib is slow
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            parents[int(name)] = int(fields[1])
    below: dict[int, int] = {}
    fresh = {pid}
    while fresh:
        fresh = {each for each, parent in parents.items() if parent in fresh and each not in below}
        below.update((each, parents[each]) for each in fresh)
    return below


def processor_ticks(root: int) -> int:
    """Processor time that the live processes below root and their ended children have used, in ticks of 10 ms."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:15]))
    return total


def kill_since(root: int, before: AbstractSet[int], collect: Callable[[], object] | None = None) -> None:
    """Kill all processes below root, except those in `before` and their descendants.

    Repeats, at most 50 times, until none is left, and each round stops processes before it kills, so that no process
    escapes by forking. collect: called after each round instead of `reap`.
    """
    for _ in range(50):
        below = descendants(root)
        kept: set[int] = set()
        fresh = set(before) & below.keys()
        while fresh:
            kept |= fresh
            fresh = {each for each, parent in below.items() if parent in fresh} - kept
        doomed = below.keys() - kept
        if not doomed:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in sorted(doomed):
                try:
                    os.kill(pid, number)
                except (ProcessLookupError, PermissionError):
                    continue
        (collect or reap)()


def reap() -> dict[int, int]:
    """Collect ended children. Returns exit codes by pid (negative: killed by that signal)."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)
