"""Watching directories by inotify(7)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from envd.guest.loop import Loop
from envd.guest.protocol import Writer
from envd.tools.paths import open_in_root, relative

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_ATTRIB, _OVERFLOW, _IGNORED, _IS_DIR = 0x4, 0x4000, 0x8000, 0x40000000
_KINDS = {_CREATE: 1, _MODIFY: 2, _ATTRIB: 2, _DELETE: 3, _MOVED_FROM: 4, _MOVED_TO: 5}
_ALL = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_EVENT = struct.Struct("iIII")
_MAX_DIRECTORIES = 8192
_LOST = 6
_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """One WATCH ask. tell: takes the fields of a part. Raises OSError where it can't be watched."""

    def __init__(self, loop: Loop, root: Path, path: str, recursive: bool, tell: Callable[[bytes], None]) -> None:
        self._loop, self._root, self._recursive, self._tell = loop, root, recursive, tell
        self._names: dict[int, str] = {}
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            self._add(relative(path))
        except OSError:
            os.close(self._fd)
            raise
        loop.watch(self._fd, self._read)
        tell(_part([]))

    def close(self) -> None:
        """Watch no more."""
        self._loop.unwatch(self._fd)
        os.close(self._fd)

    def _add(self, path: str) -> list[tuple[int, str]]:
        """Watch a path, and with `recursive` what is below; returns what is there already as created."""
        if len(self._names) >= _MAX_DIRECTORIES:
            raise OSError(errno.ENOSPC, f"more than {_MAX_DIRECTORIES} directories to watch")
        fd = open_in_root(self._root, path, os.O_PATH)
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        try:
            number = _libc.inotify_add_watch(self._fd, f"/proc/self/fd/{fd}".encode(), _ALL)
            if number < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(fd)
        self._names[number] = path
        return self._below(path) if is_directory and self._recursive else []

    def _below(self, path: str) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        fd = open_in_root(self._root, path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        finally:
            os.close(fd)
        for name, is_directory in names:
            below = name if path == "." else f"{path}/{name}"
            found.append((1, below))
            if is_directory:
                found += self._add_late(below)
        return found

    def _add_late(self, path: str) -> list[tuple[int, str]]:
        try:
            return self._add(path)
        except (FileNotFoundError, NotADirectoryError):
            return []  # it has gone again
        except (OSError, RecursionError):
            return [(_LOST, path)]

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        found: list[tuple[int, str]] = []
        at = 0
        while at < len(data):
            number, mask, _, size = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0"))
            at += _EVENT.size + size
            if mask & _OVERFLOW:
                found.append((_LOST, ""))
            elif mask & _IGNORED:
                self._names.pop(number, None)
            elif number in self._names:
                found += self._event(self._names[number], name, mask)
        told = [each for number, each in enumerate(found) if number == 0 or each != found[number - 1]]
        if told:
            self._tell(_part(told))

    def _event(self, above: str, name: str, mask: int) -> list[tuple[int, str]]:
        path = above if not name else name if above == "." else f"{above}/{name}"
        found = [(kind, path) for bit, kind in _KINDS.items() if mask & bit]
        if self._recursive and mask & _IS_DIR and mask & (_CREATE | _MOVED_TO):
            found += self._add_late(path)
        return found


def _part(changes: list[tuple[int, str]]) -> bytes:
    fields = Writer().u32(len(changes))
    for kind, path in changes:
        fields.u8(kind).data(os.fsencode(path))
    return fields.body()
