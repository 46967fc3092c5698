"""Usage of a sandbox's disk, as the host's kernel counts it."""

from __future__ import annotations

import os
from typing import NamedTuple

_FULL = 0.98
"""Share of its bytes or files from which a disk counts as full."""


class Disk(NamedTuple):
    """Usage of a sandbox's disk."""

    used_bytes: int = 0
    full: bool = False
    """Whether there is no room left, for bytes or for files."""


def disk_of(pid: int) -> Disk:
    """Disk usage of the sandbox of a process (host pid); empty if the disk can't be read.

    Reads /tmp, which is on that disk and a mount that the sandbox can't change.
    """
    try:
        about = os.statvfs(f"/proc/{pid}/root/tmp") if pid else None
    except OSError:
        about = None
    if about is None:
        return Disk()
    full = _taken(about.f_blocks, about.f_bfree) >= _FULL or _taken(about.f_files, about.f_ffree) >= _FULL
    return Disk((about.f_blocks - about.f_bfree) * about.f_frsize, full)


def _taken(whole: int, free: int) -> float:
    return (whole - free) / whole if whole else 0.0
