"""Processes of this machine: identity that survives the reuse of pids, end, limit of open files."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

_OPEN_FILES = 65536


def boot_id() -> str | None:
    """Kernel's id of this boot, or None without /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def pid_space() -> str | None:
    """This boot and pid namespace, within which pid and start time identify a process; None without /proc.

    Containers of one node share its boot, and each has a pid 1. An inode of a namespace is used again only after all of
    its processes have ended.
    """
    boot = boot_id()
    try:
        if boot is None or str(Path("/proc/self").readlink()) != str(os.getpid()):  # /proc of another namespace
            return None
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def start_of(pid: int) -> str | None:
    """Start time of a live process in clock ticks since boot, or None if there is none.

    Source: proc(5), field 22 of stat.

    Raises OSError if /proc can't be read, e.g. for lack of descriptors.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process: SIGTERM, and SIGKILL after `grace_s` seconds."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def allow_open_files() -> None:
    """Raise this process's limit of open files, of which a server needs one for each client, as far as the hard limit
    allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
