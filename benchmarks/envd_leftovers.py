"""What a server may leave on a machine, looked at before and after: processes, mounts, control groups, files,
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
    """From now on processes below this one that lose their parent become its children, so that none escapes the
    count.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this process can't adopt orphans")


@dataclass(frozen=True)
class Leftovers:
    """What is there; sets, so that what was there before can be taken off."""

    processes: frozenset[int]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]

    def since(self, before: Leftovers) -> Leftovers:
        """What is there now and was not before."""
        return Leftovers(
            self.processes - before.processes,
            self.mounts - before.mounts,
            self.cgroups - before.cgroups,
            self.files - before.files,
        )

    def __bool__(self) -> bool:
        return bool(self.processes or self.mounts or self.cgroups or self.files)


def look(folder: Path, pids: set[int]) -> Leftovers:
    """folder: where the server had its files. pids: of all servers that ran, which their groups and directories are
    named after.
    """
    reap()
    return Leftovers(
        frozenset(descendants(os.getpid())),
        frozenset(_mounts(folder)),
        frozenset(_groups(pids)),
        frozenset(str(path) for path in folder.rglob("*")),
    )


def settled(folder: Path, pids: set[int], before: Leftovers) -> Leftovers:
    """What is left once it had time to end."""
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
    """Collect adopted children that ended; those that `subprocess` waits for end while their owner looks."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z" and int(fields[1]) == os.getpid() and int(entry.name) not in _waited_for:
                os.waitpid(int(entry.name), os.WNOHANG)


_waited_for: set[int] = set()


def keep(pid: int) -> None:
    """A child that its starter waits for itself."""
    _waited_for.add(pid)


def _mounts(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(folder) in line or OWNED in line]


def _groups(pids: set[int]) -> list[str]:
    """Groups named after one of these processes, as a server's are after its directory, and that after the server."""
    owners, found = {str(pid) for pid in pids}, []
    for path, names, _ in os.walk(_CGROUPS):
        for name in names:
            if name.startswith(OWNED) and owners.intersection(name.removeprefix(OWNED).split(".")[1:2]):
                found.append(f"{path}/{name}")
    return found
