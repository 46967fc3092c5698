"""Operations on memory files, which are sparse, large, and written by an untrusted process."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from envd.errors import EnvdError

_PIECE = 64 * 1024 * 1024


def open_written(directory: Path, name: str, most_bytes: int) -> int:
    """Open a file that a VMM wrote in its directory.

    Raises EnvdError if it is missing, a link or a device, or larger than most_bytes.
    """
    try:
        fd = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise EnvdError(f"the virtual machine's {name} can't be read: {error.strerror}") from error
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > most_bytes:
        os.close(fd)
        raise EnvdError(f"the virtual machine's {name} is not a file of at most {most_bytes} bytes")
    return fd


def overlay(source: int, target: int) -> int:
    """Copy the written parts of `source` over `target`, without other changes to it. Returns the bytes copied.

    With an empty target this is a copy; with a memory file it applies a diff snapshot, as Firecracker's
    `snapshot-editor edit-memory rebase` does.
    """
    size, at, copied = os.fstat(source).st_size, 0, 0
    if os.fstat(target).st_size < size:
        os.ftruncate(target, size)
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            moved = os.copy_file_range(source, target, min(_PIECE, at - start), start, start)
            if moved == 0:
                raise EnvdError("a memory file became shorter while it was copied")
            start += moved
            copied += moved
    return copied


def write_over(target: Path, *sources: int) -> None:
    """Create a file from its sources, each copied over the previous ones; world-readable for VMMs of other users."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for source in sources:
            overlay(source, fd)
    finally:
        os.close(fd)
    target.chmod(0o644)
