"""Temporary files and folders whose names contain their owner process, so that leftovers of dead processes are
recognized.

    <prefix><machine>.<pid>.<start>.<random>

machine: digest of the boot and the pid namespace, so each container is a machine of its own; start: start time of the
process, since pids are reused. Only leftovers of this machine's processes are recognized; those of other machines are
never touched.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from contracts.processes import pid_space, start_of

Fate = Literal["alive", "gone", "unknown"]
_UNSEEN_START = "0"
_SHORT = Path("/tmp")
_SOCKET_PATH = 107
"""Maximum bytes of a socket's path on Linux (unix(7))."""
ABANDONED_S = 24 * 3600.0
"""Age in seconds above which files without an owner on this machine count as leftovers."""
_DIGITS = 12
_NAME = re.compile(r"(?P<machine>[0-9a-f]{6}|[0-9a-f]{12}|unseen)\.(?P<pid>\d+)\.(?P<start>\d+)\.[A-Za-z0-9_]+")


def owned_name() -> str:
    """New name that contains the identity of this process."""
    return f"{_owner(os.getpid())}.{uuid.uuid4().hex[:10]}"


def owned_directory(prefix: str, parent: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Temporary directory of this process. parent: the system's temporary folder if None."""
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{_owner(os.getpid())}.", dir=parent)


def socket_directory(prefix: str, socket_name: int) -> Path:
    """Folder of this process for sockets: in the temporary folder, or in /tmp if a socket's path would be too long.

    socket_name: bytes of the longest socket's name. First removes leftovers of dead processes with the same prefix; the
    caller removes the new folder.
    """
    usual, name = Path(tempfile.gettempdir()), f"{prefix}{owned_name()}"
    for parent in {usual, _SHORT}:
        sweep_abandoned(parent, prefix)
    fits = len(os.fsencode(usual / name)) + 1 + socket_name <= _SOCKET_PATH
    directory = (usual if fits else _SHORT) / name
    directory.mkdir(mode=0o700)
    return directory


def fate_of_owner(name: str, prefix: str = "") -> Fate:
    """State of the process that owns a name. unknown: a foreign name, another machine, or not visible."""
    found = _NAME.match(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if found is None or found["start"] == _UNSEEN_START or not _is_here(found["machine"]):
        return "unknown"
    try:
        return "alive" if start_of(int(found["pid"])) == found["start"] else "gone"
    except OSError:
        return "unknown"


def is_abandoned(name: str, prefix: str = "") -> bool:
    """Whether a name that starts with `prefix` belongs to a process of this machine that has ended."""
    return fate_of_owner(name, prefix) == "gone"


def is_leftover(name: str, age_s: float, *prefixes: str) -> bool:
    """Whether a file of this age and name may be removed: its process has ended, or it is old and its owner is not on
    this machine. Never true for a name that we did not make.
    """
    ours = [prefix for prefix in prefixes if name.startswith(prefix) and _NAME.match(name.removeprefix(prefix))]
    fates = {fate_of_owner(name, prefix) for prefix in ours}
    return "gone" in fates or (fates == {"unknown"} and age_s > ABANDONED_S)


def abandoned(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Files and folders in `parent` that dead processes left."""
    try:
        entries = sorted(parent.iterdir())
    except OSError:
        return
    for entry in entries:
        if is_abandoned(entry.name, prefix):
            yield entry


def sweep_abandoned(parent: Path, prefix: str = "") -> None:
    """Remove leftovers of dead processes in `parent`. Safe to run concurrently."""
    for entry in abandoned(parent, prefix):
        remove(entry)


def remove(entry: Path) -> None:
    """Remove a file or folder, also one with read-only folders; ignore it if it is gone or belongs to another user."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
        if entry.exists():
            _unlock(entry)
            shutil.rmtree(entry, ignore_errors=True)
    else:
        with suppress(OSError):
            entry.unlink()


def _unlock(folder: Path) -> None:
    """Let the owner of a folder change it and all folders below."""
    with suppress(OSError):
        folder.chmod(0o700)
    for above, names, _ in os.walk(folder):  # a folder is listed after the loop below has unlocked it
        for path in (Path(above, name) for name in names):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o700)


@functools.lru_cache(maxsize=4)
def _owner(pid: int) -> str:
    # without /proc owners are unknown: use a name that matches no machine
    return f"{_machine() or 'unseen'}.{pid}.{start_of(pid) or _UNSEEN_START}"


def _is_here(machine: str) -> bool:
    """Whether a name's machine is this one; names of earlier versions have its first six digits."""
    here = _machine()
    return here is not None and here.startswith(machine)


@functools.cache
def _machine() -> str | None:
    """Digits for this boot and pid namespace, or None without /proc."""
    space = pid_space()
    return None if space is None else hashlib.sha256(space.encode()).hexdigest()[:_DIGITS]
