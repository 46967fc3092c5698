"""What an agent answers, as types, and taking frames apart into them. Every size that a guest states is checked."""

from __future__ import annotations

import errno
import struct
from enum import IntEnum
from typing import NamedTuple

from envd.guest.protocol import ProtocolError, Reader

_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<BIQqI")
_MAX_PATH = 65536
_TYPES = {1: "file", 2: "directory", 3: "link", 4: "other"}


class GuestInfo(NamedTuple):
    """Who answers at the other end."""

    version: int
    """Of the protocol."""
    pid: int
    """The agent's, as the sandbox sees it."""


class Entry(NamedTuple):
    """What is at a path. Paths are text with surrogate escapes: they need not be UTF-8."""

    path: str
    """Relative to the workspace; its root is `.`."""
    type: str
    """file, directory, link or other."""
    mode: int
    """Permission bits."""
    size: int
    mtime_ns: int
    target: str
    """Where a link points."""


class ShellResult(NamedTuple):
    """How one command of a shell ended, and what it wrote."""

    code: int
    """0 to 255. 128+signal where the shell was killed."""
    timed_out: bool
    died: bool
    """The shell ended with the command, and is started anew."""
    true_bytes: int
    """Size of the whole output."""
    head: bytes
    """All of it where it fits, else its first half limit."""
    tail: bytes
    """Its last half limit where `head` is not all."""


class ProcessState(NamedTuple):
    """A process that was started by `GuestLink.start`."""

    process: int
    """Its number in this sandbox; never used again."""
    pid: int
    running: bool
    code: int
    """Exit code, -N where signal N killed it; 0 while it runs."""
    timed_out: bool
    stdout: int
    """Bytes written so far."""
    stderr: int
    argv: tuple[str, ...]


class OutputChunk(NamedTuple):
    """A piece of a process's output."""

    start: int
    """Offset of `data`; above what was asked for where the ring dropped what was between."""
    total: int
    """Bytes written so far."""
    ended: bool
    """No more will come, and `data` reaches the end."""
    data: bytes


class ChangeKind(IntEnum):
    """What happened at a watched path."""

    CREATED = 1
    CHANGED = 2
    REMOVED = 3
    MOVED_FROM = 4
    MOVED_TO = 5
    OVERFLOW = 6
    """Changes were lost: list again."""


class Change(NamedTuple):
    """Something that happened below a watched path."""

    kind: ChangeKind
    path: str


def name(value: str) -> bytes:
    """Text that a guest takes, a path for one, as bytes. Raises OSError EINVAL for what no system call takes."""
    try:
        data = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise OSError(errno.EINVAL, "text is not valid unicode") from error
    if b"\0" in data:
        raise OSError(errno.EINVAL, "text holds a NUL")
    return data


def milliseconds(seconds: float) -> int:
    """Seconds as the protocol has them: at least 1 ms where not 0, at most 49 days."""
    return min(max(int(seconds * 1000), 1 if seconds > 0 else 0), 0xFFFFFFFF)


def text(data: bytes) -> str:
    """Bytes of a path as text."""
    return data.decode("utf-8", "surrogateescape")


def read_entry(body: bytes, at: int = 0) -> tuple[Entry, int]:
    """The entry at an offset, and where it ends."""
    try:
        (size,) = _LENGTH.unpack_from(body, at)
        at += 4
        path = body[at : at + size]
        at += size
        kind, mode, length, stamp, link = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        target = body[at : at + link]
        at += link
        if at > len(body) or size > _MAX_PATH or link > _MAX_PATH:
            raise ProtocolError("an entry ends beyond its frame")
        entry = Entry(text(path), _TYPES[kind], mode & 0o7777, length, stamp, text(target) if link else "")
    except (struct.error, KeyError) as error:
        raise ProtocolError("an entry is malformed") from error
    return entry, at


def only_entry(body: bytes) -> Entry:
    """The entry that is all of a frame."""
    entry, at = read_entry(body)
    if at != len(body):
        raise ProtocolError("a frame has trailing bytes")
    return entry


def entry_and_data(body: bytes, at_most: int) -> tuple[Entry, bytes]:
    """An entry and the bytes behind it, which end the frame."""
    entry, at = read_entry(body)
    if len(body) - at < 4:
        raise ProtocolError("a frame ends within a field")
    (size,) = _LENGTH.unpack_from(body, at)
    if size > at_most or at + 4 + size != len(body):
        raise ProtocolError("the size of the data differs from the requested size")
    return entry, body[at + 4 :]


def shell_results(body: bytes, count: int, limit: int) -> list[ShellResult]:
    """The results of `count` commands with output of up to `limit` bytes each."""
    reader = Reader(body)
    if reader.u32() != count:
        raise ProtocolError("the number of results differs from the number of commands")
    found = []
    for _ in range(count):
        code, flags, true_bytes = reader.i32(), reader.u8(), reader.u64()
        head, tail = reader.data(), reader.data()
        if len(head) + len(tail) != min(true_bytes, limit // 2 * 2) and not (true_bytes == len(head) <= limit):
            raise ProtocolError("the size of the output contradicts its command's limit and reported size")
        found.append(ShellResult(code & 0xFF, bool(flags & 1), bool(flags & 2), true_bytes, head, tail))
    reader.end()
    return found


def read_state(reader: Reader) -> ProcessState:
    """One process's state."""
    process, pid, running, code = reader.u32(), reader.u32(), reader.u8(), reader.i32()
    timed_out, stdout, stderr = reader.u8(), reader.u64(), reader.u64()
    argv = tuple(text(each) for each in reader.items())
    return ProcessState(process, pid, bool(running), code, bool(timed_out), stdout, stderr, argv)


def only_state(body: bytes) -> ProcessState:
    """The state that is all of a frame."""
    reader = Reader(body)
    state = read_state(reader)
    reader.end()
    return state


def states(body: bytes) -> list[ProcessState]:
    """All processes' states."""
    reader = Reader(body)
    count = reader.u32()
    if count * 34 > len(body):
        raise ProtocolError("a list is longer than its frame")
    found = [read_state(reader) for _ in range(count)]
    reader.end()
    return found


def output_chunk(body: bytes, at_most: int) -> OutputChunk:
    """A piece of output of up to `at_most` bytes."""
    reader = Reader(body)
    start, total, ended, data = reader.u64(), reader.u64(), reader.u8(), reader.data()
    reader.end()
    if len(data) > at_most or start + len(data) > total:
        raise ProtocolError("more output than requested or written")
    return OutputChunk(start, total, bool(ended), data)


def read_changes(body: bytes) -> tuple[Change, ...]:
    """The changes in one part of a watch."""
    reader = Reader(body)
    count = reader.u32()
    if count * 5 > len(body):
        raise ProtocolError("a list is longer than its frame")
    try:
        found = tuple(Change(ChangeKind(reader.u8()), text(reader.data())) for _ in range(count))
    except ValueError as error:
        raise ProtocolError(f"changes are malformed: {error}") from error
    reader.end()
    return found
