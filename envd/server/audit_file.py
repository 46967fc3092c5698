"""File of an audit log: appends lines at once, syncs them to disk in batches, and rotates at a size."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from pathlib import Path

from contracts.errors import describe
from envd.errors import EnvdError

_SYNC_S = 0.2
"""Pause between two syncs, in seconds."""
_log = logging.getLogger("envd.audit")


class AuditFile:
    """Appends lines to a file that this process has locked. Not thread-safe: the caller holds a lock."""

    def __init__(self, path: Path, *, max_bytes: int, files: int) -> None:
        self._path, self._max_bytes, self._files = path, max_bytes, files
        self._full = max_bytes
        """Size at which to rotate."""
        self._lost = 0
        self._lock_fd = _lock(path)
        self._fd, self._size = _open(path)
        # a killed server may have left a torn last line
        self._torn = bool(self._size) and os.pread(self._fd, 1, self._size - 1) != b"\n"
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._retired: list[int] = []
        self._keeper = threading.Thread(target=self._keep, name="audit", daemon=True)
        self._keeper.start()

    @property
    def name(self) -> str:
        """Name of the file, without the directory."""
        return self._path.name

    def write(self, line: bytes) -> bool:
        """Append a line. Returns False if writing failed, which is counted and not raised: the server continues."""
        if self._size + len(line) > self._full and self._size:
            self._rotate()
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._refused(describe(error))
            return False
        self._size += written
        self._torn = written < len(data)
        if self._torn:
            self._refused("the disk took a part of a line: free some space")
        if not self._dirty.is_set():
            self._dirty.set()
        return not self._torn

    def take_lost(self) -> int:
        """Number of lines lost since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        """Sync everything to disk, then close."""
        self._closing.set()
        self._dirty.set()
        self._keeper.join()
        self._sync_all()
        os.close(self._fd)
        os.close(self._lock_fd)

    def _refused(self, reason: str) -> None:
        if not self._lost:
            _log.error("the audit log %s can't be written: %s", self._path, reason)
        self._lost += 1

    def _rotate(self) -> None:
        """Open a new file, and rename the others, oldest first.

        A kill in between leaves a gap in the names and loses no lines but the oldest file's. After an error, lines
        continue in the old file, and it is tried again once that has grown by a tenth of max_bytes.
        """
        fresh = self._path.with_name(self._path.name + ".next")
        try:
            fd, size = _open(fresh, os.fstat(self._fd).st_mode & 0o640)
        except EnvdError as error:
            self._postpone(str(error))
            return
        try:
            for number in range(self._files - 1, 0, -1):
                source = self._path if number == 1 else _aside(self._path, number - 1)
                if source.exists():
                    source.rename(_aside(self._path, number))
            fresh.replace(self._path)
        except OSError as error:
            os.close(fd)
            self._postpone(describe(error))
            return
        self._retired.append(self._fd)
        self._fd, self._size, self._torn, self._full = fd, size, False, self._max_bytes

    def _postpone(self, reason: str) -> None:
        _log.error("the audit log %s can't be rotated: %s", self._path, reason)
        self._full = self._size + self._max_bytes // 10

    def _keep(self) -> None:
        """Sync the file in a thread, so that no other code waits for the disk."""
        while not self._closing.is_set():
            self._dirty.wait()
            self._dirty.clear()
            self._sync_all()
            self._closing.wait(_SYNC_S)

    def _sync_all(self) -> None:
        _sync(self._fd)  # first: once a rotation has retired it, only the loop below closes it
        while self._retired:
            old = self._retired.pop()
            _sync(old)
            os.close(old)


def last_number_of(path: Path, files: int) -> int:
    """Number of the last event in a file and its rotated files; 0 if there is none."""
    for each in (path, *(_aside(path, number) for number in range(1, files))):
        if (last := _last_number(each)) is not None:
            return last
    return 0


def _open(path: Path, mode: int = 0o640) -> tuple[int, int]:
    """Descriptor and size of a file to append to. mode: of a new file. Raises EnvdError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise EnvdError(f"the audit log can't be written: {describe(error)}") from error
    return fd, os.fstat(fd).st_size


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _sync(fd: int) -> None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        _log.error("the disk does not keep the audit log: %s", describe(error))


def _lock(path: Path) -> int:
    """Lock `PATH.lock` and return its descriptor; two servers on one file would give events the same numbers."""
    try:
        fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        raise EnvdError(f"the audit log can't be written: {describe(error)}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise EnvdError(f"another server writes the audit log {path}: give each its own file") from error
    return fd


def _last_number(path: Path) -> int | None:
    """Event number in the last valid line of a file; None if there is none. Reads only the file's last 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 65536))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvdError(f"the audit log can't be read: {describe(error)}") from error
    for line in reversed(lines):
        try:
            return int(json.loads(line)["number"])
        except (ValueError, TypeError, KeyError):
            continue
    return None
