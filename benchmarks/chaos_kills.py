"""Choose and perform kills: at named points by TRIPLANE_KILL_AT, at random times by SIGKILL from outside."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contracts.failpoints import POINTS
from envd.sandbox.proctree import descendants

_STARTERS = ("envd.sandbox.zygote", "envd-spawn")
Victim = Literal["group", "tree", "triplane", "trainer", "envd", "zygote", "sandbox"]
VICTIMS: dict[Victim, str] = {
    "group": "the process group of `triplane`: itself and its trainer",
    "tree": "all processes at once, as in a machine failure",
    "triplane": "only the orchestrating process",
    "trainer": "only the trainer",
    "envd": "only the sandbox server",
    "zygote": "only a process that forks sandboxes",
    "sandbox": "only a process in a sandbox",
}
FATAL: tuple[Victim, ...] = ("group", "tree", "triplane")
"""Choices of processes to kill that include the `triplane` command itself."""
MOST_ARRIVALS = {
    "store-write": 40,
    "artifact-staged": 8,
    "before-manifest": 8,
    "after-manifest": 8,
    "multipart-under-way": 4,
    "group-claimed": 4,
    "group-sampled": 4,
    "group-committed": 4,
    "task-sampled": 8,
    "task-committed": 8,
    "artifact-described": 8,
    "reference-written": 8,
}
"""Range of arrivals at a point from which the fatal one is drawn; default 1."""
ONLY_ON: dict[str, str] = {
    "store-write": "local",
    "multipart-under-way": "s3",
    "rank-staged": "ranks",
    "rank-part-stored": "ranks",
    "ranks-gathered": "ranks",
}
"""Kind of store that a point needs; "ranks": a trainer of several ranks, which no round has."""
BASE_ONLY = ("snapshot-committed",)
"""Points that occur only while the base policy is made."""


@dataclass(frozen=True)
class Order:
    """A kill at a named point."""

    point: str
    arrival: int

    def __str__(self) -> str:
        return f"{self.point}:{self.arrival}"


def orders(count: int, store: str, chance: random.Random) -> Iterator[Order]:
    """`count` orders: every point of this store about equally often; points of the base policy come first."""
    points = [point for point in POINTS if ONLY_ON.get(point, store) == store]
    later = [point for point in points if point not in BASE_ONLY]
    dealt = [point for point in points if point in BASE_ONLY][:count]
    while len(dealt) < count:
        dealt += chance.sample(later, min(len(later), count - len(dealt)))
    for point in dealt:
        yield Order(point, chance.randint(1, MOST_ARRIVALS.get(point, 1)))


def pick_victims(victim: Victim, triplane: int, chance: random.Random) -> Sequence[int]:
    """Processes to kill now; empty while the victim does not exist."""
    below = descendants(triplane)
    if victim == "triplane":
        return [triplane]
    if victim == "tree":
        return [triplane, *below]
    if victim == "group":
        return [triplane, *(pid for pid in below if _group_of(pid) == triplane)]
    commands = {pid: _command(pid) for pid in below}
    zygotes = [pid for pid in commands if _is_zygote(pid, below, commands)]
    found = {
        "trainer": [pid for pid, command in commands.items() if "-m trainer" in command],
        "envd": [pid for pid, command in commands.items() if "-m envd serve" in command],
        "zygote": zygotes,
        "sandbox": sorted({pid for zygote in zygotes for pid in descendants(zygote)}),
    }[victim]
    return [chance.choice(found)] if found else []


def kill_all(pids: Sequence[int]) -> bool:
    """SIGKILL all processes at once, after stopping them, so that none cleans up after another. Returns False if none
    existed.
    """
    hit = False
    for number in (signal.SIGSTOP, signal.SIGKILL) if len(pids) > 1 else (signal.SIGKILL,):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                hit = True
    return hit


def _is_zygote(pid: int, below: dict[int, int], commands: dict[int, str]) -> bool:
    """Whether the process is the verifier's zygote or the spawner.

    Process 1 of a sandbox has the command line of the process that forked it.
    """
    return any(name in commands[pid] and name not in commands.get(below[pid], "") for name in _STARTERS)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
