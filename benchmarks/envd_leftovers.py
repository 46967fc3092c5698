"""Leftovers of a server on a machine, from a comparison before and after: processes, mounts, control groups, files,
descriptors.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envd.sandbox.cgroups import OWNED
from envd.sandbox.proctree import descendants

_PR_SET_CHILD_SUBREAPER = 36
_CGROUPS = Path("/sys/fs/cgroup")
_END_S = 20.0


def adopt_orphans() -> None:
    """Make this process adopt orphaned descendants from now on, so that all are counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process can't adopt orphans")


@dataclass(frozen=True)
class Leftovers:
    """Sets of existing things, from which earlier ones can be subtracted."""

    processes: frozenset[int]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]

    def since(self, before: Leftovers) -> Leftovers:
        """Things that exist now, but did not before."""
        return Leftovers(
            self.processes - before.processes,
            self.mounts - before.mounts,
            self.cgroups - before.cgroups,
            self.files - before.files,
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.mounts or self.cgroups or self.files)


def look(folder: Path, pids: set[int]) -> Leftovers:
    """Look for leftovers. folder: the server's files. pids: of all servers that ran; groups and directories contain
    them in their names.
    """
    reap()
    return Leftovers(
        frozenset(descendants(os.getpid())),
        frozenset(_mounts(folder)),
        frozenset(_groups(pids)),
        frozenset(str(path) for path in folder.rglob("*")),
    )


def settled(folder: Path, pids: set[int], before: Leftovers) -> Leftovers:
    """Leftovers after a grace period."""
    deadline = time.monotonic() + _END_S
    while (left := look(folder, pids).since(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def descriptors(pids: set[int]) -> int:
    """Open descriptors of live processes."""
    count = 0
    for pid in pids:
        with suppress(OSError):
            count += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return count


def reap() -> None:
    """Reap adopted children that have ended; `subprocess` reaps its own."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid() and int(entry.name) not in _waited_for:
                os.waitpid(int(entry.name), os.WNOHANG)


_waited_for: set[int] = set()


def keep(pid: int) -> None:
    """Exclude a child that its starter reaps itself."""
    _waited_for.add(pid)


def _mounts(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(folder) in line or OWNED in line]


def _groups(pids: set[int]) -> list[str]:
    """Groups with one of these pids in their names; a server's groups are named after its directory, which contains its
    pid.
    """
    owners, found = {str(pid) for pid in pids}, []
    for path, names, _ in os.walk(_CGROUPS):
        for name in names:
            if name.startswith(OWNED) and owners.intersection(name.removeprefix(OWNED).split(".")[1:2]):
                found.append(f"{path}/{name}")
    return found
