"""The asks about files of a sandbox's workspace, from the server's end."""

from __future__ import annotations

import asyncio
import errno
import struct
from collections.abc import AsyncGenerator

from envd.guest import results
from envd.guest.channel import Channel
from envd.guest.protocol import CHUNK, LIST_BYTES, Ask, Writer
from envd.guest.results import Change, ChangeKind, Entry, name

_ENTRIES_A_TURN = 256
"""Entries that are taken apart before others have their turn; a guest may send very many."""
_READ = struct.Struct("<QI")
_WRITE = struct.Struct("<BIQI")
_LENGTH = struct.Struct("<I")


class FileAsks:
    """Paths are relative to the workspace, or absolute below /workspace; none leaves it. Failures are OSErrors."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def read(self, path: str, *, offset: int = 0, at_most: int = CHUNK) -> tuple[Entry, bytes]:
        """Up to at_most bytes (CHUNK at the most) of a regular file."""
        where = name(path)
        at_most = min(at_most, CHUNK)
        body = await self._channel.ask(
            Ask.READ, _LENGTH.pack(len(where)) + where + _READ.pack(offset, at_most), bound=at_most
        )
        return self._channel.parsed(results.entry_and_data, body, at_most)

    async def read_all(self, path: str, max_bytes: int) -> tuple[Entry, bytes]:
        """A whole regular file. Raises OSError EFBIG where it is larger."""
        entry, data = await self.read(path, at_most=min(max_bytes + 1, CHUNK))
        if entry.size > max_bytes or len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)
        if entry.size == len(data) < CHUNK:
            return entry, data
        pieces = [data]
        total = len(data)
        while pieces[-1]:
            entry, data = await self.read(path, offset=total)
            pieces.append(data)
            total += len(data)
            if total > max_bytes:
                raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)
        return entry, b"".join(pieces)

    async def write(
        self,
        path: str,
        data: bytes,
        *,
        parents: bool = False,
        exclusive: bool = False,
        in_place: bool = False,
        mode: int = 0,
    ) -> Entry:
        """Write a whole file: a reader sees the old content or the new. in_place: as a program does, keeping links and
        modes.

        exclusive: raise FileExistsError where something is there. mode: 0 keeps what is there, else 0644.
        """
        where = name(path)
        head = _LENGTH.pack(len(where)) + where
        flags = parents * 2 | exclusive * 4 | in_place * 16
        pieces = []
        for at in range(0, len(data) or 1, CHUNK):
            piece = data[at : at + CHUNK]
            last = at + CHUNK >= len(data)
            pieces.append(head + _WRITE.pack(flags | last, mode, at, len(piece)) + piece)
        return self._channel.parsed(results.only_entry, await self._channel.ask_in_pieces(Ask.WRITE, pieces))

    async def stat(self, path: str, *, follow: bool = True) -> Entry:
        """What is at a path."""
        return self._channel.parsed(
            results.only_entry, await self._channel.ask(Ask.STAT, Writer().data(name(path)).u8(follow).body())
        )

    async def list(
        self,
        path: str = ".",
        *,
        depth: int = 1,
        limit: int = 100_000,
        skip_hidden: bool = False,
        files_only: bool = False,
    ) -> tuple[list[Entry], bool]:
        """What is below a directory, sorted, a directory before what is in it, and whether some was left out. depth 0:
        without end.

        skip_hidden: leave out .git, __pycache__ and .pytest_cache. Links are not followed.
        """
        fields = Writer().data(name(path)).u32(depth).u32(limit).u8(skip_hidden * 1 | files_only * 2)
        parts: list[bytes] = []
        truncated = await self._channel.ask(Ask.LIST, fields.body(), bound=LIST_BYTES, parts=parts)
        found: list[Entry] = []
        for part in parts:
            at = 4
            (count,) = self._channel.parsed(_LENGTH.unpack_from, part)
            for number in range(count):
                entry, at = self._channel.parsed(results.read_entry, part, at)
                found.append(entry)
                if number % _ENTRIES_A_TURN == _ENTRIES_A_TURN - 1:
                    await asyncio.sleep(0)
            if at != len(part) or len(found) > limit:
                self._channel.broken("a part of a listing has another size than it says")
        return found, truncated != b"\0"

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> Entry:
        """Rename within the workspace. Raises FileExistsError where the target is there and may not be replaced."""
        fields = Writer().data(name(source)).data(name(target)).u8(overwrite)
        return self._channel.parsed(results.only_entry, await self._channel.ask(Ask.MOVE, fields.body()))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or with `recursive` all below it."""
        await self._channel.ask_for_nothing(Ask.REMOVE, Writer().data(name(path)).u8(recursive).body())

    async def mkdir(self, path: str, *, parents: bool = False) -> Entry:
        """Make a directory. With `parents` those above it too, and one that is there is fine."""
        fields = Writer().data(name(path)).u8(parents)
        return self._channel.parsed(results.only_entry, await self._channel.ask(Ask.MKDIR, fields.body()))

    async def watch(self, path: str = ".", *, recursive: bool = True) -> AsyncGenerator[tuple[Change, ...], None]:
        """Changes as they come; the first, empty, says that the guest watches.

        Use `contextlib.aclosing`, so that it ends with its reader.
        """
        identity, waiting = self._channel.open_stream(Ask.WATCH, Writer().data(name(path)).u8(recursive).body())
        try:
            while True:
                part = await self._channel.next_part(waiting)
                if part is None:
                    yield (Change(ChangeKind.OVERFLOW, ""),)
                else:
                    yield self._channel.parsed(results.read_changes, part)
        finally:
            self._channel.close_stream(identity)
