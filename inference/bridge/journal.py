"""Append-only journal on disk: what was appended survives the process, and a batch later the machine.

    append -> write() before the caller goes on -> fsync of all that was written, every FSYNC_S seconds

A frame is length, CRC-32, kind, handle and payload; a handle is the number of what the frame is about. Frames lie in
segments, 00000001.journal and so on, after MAGIC. Only the oldest segment is ever deleted, so that no frame outlives
one that takes it back; a handle that keeps an old segment alone is moved to the newest one (`clean`). A torn frame at
the end, left by a kill or a power failure, is cut off when the journal is opened.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from contracts.errors import describe
from inference.bridge.errors import JournalError

SEGMENT_BYTES = 16 << 20
"""Size at which a new segment is begun."""
SPARE_SEGMENTS = 4
"""Segments beyond twice the live bytes that are kept before old ones are cleaned."""
MOVED_AT_ONCE = 64
"""Handles that one call of `clean` moves, so that it takes milliseconds."""
FSYNC_S = 0.05
"""Seconds between two fsyncs while frames are appended: what a power failure may take."""
RETRY_S = 1.0
"""Seconds between a failed fsync and the next one."""
MAGIC = b"tpbridg2"
"""First bytes of a segment; they change with the format."""
_HEADER = struct.Struct("<IIBQ")
_AFTER_CRC = struct.Struct("<BQ")
_LONGEST = 1 << 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frame:
    """One entry of the journal."""

    kind: int
    """0 to 255; the journal does not interpret it."""
    handle: int
    payload: bytes


Snapshot = Callable[[int], Sequence[bytes]]
"""Frames (`frame`) that say everything about a handle."""


class Journal:
    """The journal of one process in one directory. Not thread-safe."""

    SNAPSHOT = 255
    """Kind of a frame whose payload is frames that replace all earlier ones of its handle."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises JournalError if the directory can't be used, has a foreign file, or another process uses it."""
        self._directory, self._segment_bytes = directory, segment_bytes
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"the journal can't be opened: {describe(error)}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalError(f"another bridge uses the journal {directory}: name another --journal") from None
        files = sorted(directory.glob("*.journal"))
        foreign = next((path.name for path in files if not path.stem.isdecimal()), None)
        if foreign is not None:
            os.close(self._lock)
            raise JournalError(f"{directory} has {foreign}, which is no part of a journal: name another --journal")
        self._segments = sorted(int(path.stem) for path in files)
        self._first: dict[int, int] = {}
        """Handle -> segment with its oldest frame that counts."""
        self._held: dict[int, int] = {}
        """Segment -> number of handles in `_first` with it."""
        self._sizes: dict[int, int] = {}
        """Handle -> bytes of its frames that count."""
        self._live = 0
        self._fd = -1
        self._offset = 0
        self._unsynced: list[int] = []
        """Full segments that were not synced yet."""
        self._unneeded: list[int] = []
        """Segments to delete after the next sync."""
        self._dirty = asyncio.Event()

    def read(self) -> Iterator[Frame]:
        """All frames, oldest first, and begin a new segment after them. Call it once, before `append`.

        Raises JournalError for a file that can't be read, or if no segment can be begun.
        """
        for number in self._segments:
            yield from self._read_segment(number)
        try:
            self._begin((self._segments[-1] if self._segments else 0) + 1)
        except OSError as error:
            raise JournalError(f"the journal can't be written: {describe(error)}") from error

    def append(self, kind: int, handle: int, *parts: bytes) -> None:
        """Write a frame. Raises JournalError if it can't be written; the journal is then as before."""
        data = frame(kind, handle, *parts)
        self._write(data)
        self._count(handle, self._segments[-1], len(data))

    def forget(self, handle: int) -> None:
        """Note that the frames of a handle need not be kept. A later `read` may still yield them."""
        first = self._first.pop(handle, None)
        if first is not None:
            self._held[first] -= 1
            self._live -= self._sizes.pop(handle)

    def forget_others(self, handles: Container[int]) -> None:
        """Forget all handles but these."""
        for handle in [each for each in self._first if each not in handles]:
            self.forget(handle)

    def clean(self, snapshot: Snapshot) -> None:
        """Let go of the oldest segments that nothing needs, to be deleted after the next sync. Move some handles out of
        the oldest if the journal is much larger than what counts. Raises JournalError.
        """
        if len(self._segments) > SPARE_SEGMENTS + 2 * self._live // self._segment_bytes:
            oldest = self._segments[0]
            held = (handle for handle, first in self._first.items() if first == oldest)
            for handle in list(islice(held, MOVED_AT_ONCE)):
                data = frame(self.SNAPSHOT, handle, *snapshot(handle))
                self._write(data)  # first: if it fails, the old frames still count
                self.forget(handle)
                self._count(handle, self._segments[-1], len(data))
        while len(self._segments) > 1 and not self._held.get(self._segments[0], 0):
            number = self._segments.pop(0)
            self._held.pop(number, None)
            self._unneeded.append(number)
            self._dirty.set()

    async def sync(self) -> None:
        """Sync what is appended, in batches, until cancelled. An error is logged; the next batch, after RETRY_S,
        tries again.
        """
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            full, unneeded = list(self._unsynced), list(self._unneeded)
            try:
                await asyncio.to_thread(_sync, [*full, self._fd], [self._path(number) for number in unneeded])
            except OSError as error:
                _log.error("the journal can't be synced: %s", describe(error))
                self._dirty.set()
                await asyncio.sleep(RETRY_S)
            else:
                del self._unsynced[: len(full)], self._unneeded[: len(unneeded)]
                for fd in full:
                    os.close(fd)
            await asyncio.sleep(FSYNC_S)

    def close(self) -> None:
        """Sync and close."""
        opened = [*self._unsynced, *([self._fd] if self._fd >= 0 else [])]
        try:
            _sync(opened, ())
        except OSError as error:
            _log.error("the journal can't be synced: %s", describe(error))
        for fd in [*opened, self._lock]:
            os.close(fd)
        self._unsynced, self._fd = [], -1

    def _write(self, data: bytes) -> None:
        try:
            if self._offset >= self._segment_bytes:
                self._begin(self._segments[-1] + 1)
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            os.ftruncate(self._fd, self._offset)
            raise JournalError(f"the journal can't be written: {describe(error)}") from error
        self._offset += len(data)
        self._dirty.set()

    def _count(self, handle: int, segment: int, size: int) -> None:
        if handle not in self._first:
            self._first[handle] = segment
            self._held[segment] = self._held.get(segment, 0) + 1
            self._sizes[handle] = 0
        self._sizes[handle] += size
        self._live += size

    def _begin(self, number: int) -> None:
        """Begin a segment."""
        fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, MAGIC)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            self._unsynced.append(self._fd)
        self._fd, self._offset = fd, len(MAGIC)
        self._segments.append(number)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _read_segment(self, number: int) -> Iterator[Frame]:
        path = self._path(number)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise JournalError(f"the journal can't be read: {describe(error)}") from error
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise JournalError(f"{path} is not of this release's bridge: end its episodes with that, or move it away")
        whole = min(len(MAGIC), len(data))
        for each, end in split(data, whole):
            if each.kind == self.SNAPSHOT:
                self.forget(each.handle)
            self._count(each.handle, number, _HEADER.size + len(each.payload))
            whole = end
            yield each
        if whole < len(data):
            _log.warning("%s: cut %d bytes of an unfinished frame", path, len(data) - whole)
            os.truncate(path, whole)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08}.journal"


def frame(kind: int, handle: int, *parts: bytes) -> bytes:
    """A frame as bytes."""
    body = _AFTER_CRC.pack(kind, handle) + b"".join(parts)
    return _HEADER.pack(len(body), zlib.crc32(body), kind, handle) + body[_AFTER_CRC.size :]


def split(data: bytes, offset: int = 0) -> Iterator[tuple[Frame, int]]:
    """Whole frames of `data` from `offset` on, each with the offset of its end."""
    while offset + _HEADER.size <= len(data):
        length, crc, kind, handle = _HEADER.unpack_from(data, offset)
        body = offset + _HEADER.size - _AFTER_CRC.size
        end = body + length
        if not _AFTER_CRC.size <= length <= _LONGEST or end > len(data) or zlib.crc32(data[body:end]) != crc:
            return
        yield Frame(kind, handle, data[body + _AFTER_CRC.size : end]), end
        offset = end


def _sync(descriptors: Sequence[int], unneeded: Sequence[Path]) -> None:
    """Sync files, and then delete those that the synced ones replace."""
    for fd in descriptors:
        os.fsync(fd)
    for path in unneeded:
        path.unlink(missing_ok=True)
