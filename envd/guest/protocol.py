"""What goes over the stream between a server and the agent in a sandbox. envd/native/protocol.h says the same in C.

    frame    u32 size of what follows | u32 id | u8 kind | fields            all integers little-endian, size <=
             MAX_FRAME

The server asks (id above 0, unique among what is outstanding, kind a `Ask`); the agent answers each ask with any number
of PART frames and exactly one OK or ERROR of the same id. Asks are answered in any order; file asks are never kept
waiting by a running command. CANCEL ends what an ask still does; the cancelled ask answers ERROR ECANCELED, unless its
answer was under way. A SHELL ask's commands end as at their deadline (the shell is started anew), the pieces of a WRITE
are thrown away, a SHELL that still queued never runs. When the stream ends, so does the agent, with all that it
started. Both sides treat a frame beyond the bounds, an unknown kind or trailing bytes as the peer's fault and close:
code in a sandbox may have taken its agent over.

Fields: u8 u32 u64 i32 i64 as they are; `bytes` u32 length and the bytes; `list` u32 count and that many `bytes`.

ask       fields                                                    parts                          ok
INIT      host_name bytes, seed bytes, env list, unix_ns i64        -                              version u32, pid u32
          env: K=V of all that is started from now on; seed: mixed into the kernel's entropy where the agent may;
          unix_ns: 0, or the time to set where the agent owns the clock. Asked again after a fork or a restore.
SHELL     limit u32, n u32, n times (command bytes, deadline_ms u32)
                                                                    -                              n u32, n times (code
                                                                                                   i32, flags u8,
                                                                                                   true_bytes u64, head
                                                                                                   bytes, tail bytes)
          One stateful bash, started at first use: working directory, variables, functions, background processes live
          on. One command runs in the shell itself; several run at the same time in subshells of it. Output (both
          streams mixed, up to limit/2 bytes of head and of tail; tail is empty unless more came than `limit`). code:
          0-255. flags: 1 timed out, 2 the shell died and is started anew (code is 128+signal or its exit code). A
          command beyond its deadline is killed with all that it started, also what daemonized; then the shell is
          started anew. SHELL asks queue behind each other. n = 0 starts the shell where it does not run yet, so that
          the first command need not wait for it.
START     argv list, env list, directory bytes, flags u8, rows u32, columns u32, timeout_ms u32, ring u32
                                                                    -                              process u32, pid u32
          flags: 1 a pty, 2 stdin stays open. directory: relative to the workspace, or
          absolute. timeout_ms 0: none.
OUTPUT    process u32, channel u8, offset u64, max u32, wait_ms u32 -                              start u64, total u64,
          ended u8, data bytes
          channel 1 stdout, 2 stderr. Waits until there is data at `offset` or the channel has ended, at most wait_ms.
          start > offset: the ring dropped what was between. ended: no more data will come and data reaches the end.
WAIT      process u32, wait_ms u32                                  -                              state
PROCESSES -                                                         -                              n u32, n times
                                                                    (state)
STDIN     process u32, data bytes                                   -                              accepted u32
CLOSE_STDIN process u32                                             -                              -
SIGNAL    process u32, signal u32, tree u8                          -                              -
RESIZE    process u32, rows u32, columns u32                        -                              -
          state: process u32, pid u32, running u8, code i32 (-N: by signal N), timed_out u8, stdout u64, stderr u64,
          argv list
READ      path bytes, offset u64, max u32                           -                              entry, data bytes
WRITE     path bytes, flags u8, mode u32, offset u64, data bytes    -                              entry
          flags: 1 last piece, 2 make parents, 4 must create, 8 also where `path` is a directory's name: refuse EISDIR
          (always so), 16 into place (not atomic: open, truncate, write; keeps links and modes as a program's own write
          does). Without 16 pieces of one ask id go to a hidden temporary file beside `path` and are renamed over it
          with the last piece; pieces of one file carry offset 0, len, ... in order. mode 0: as it was, else 0644. Every
          piece is answered; the next is sent after that. A piece that fails throws all away, and so does a CANCEL of
          the id.
STAT      path bytes, follow u8                                     -                              entry
LIST      path bytes, depth u32, limit u32, flags u8                n u32, n times (entry)         truncated u8
          flags: 1 leave out .git __pycache__ .pytest_cache, 2 files and links only. Sorted by name within a directory,
          a directory before what is in it; entry paths are relative to the workspace. Links are not followed. depth 0:
          without end. Truncated where `limit` entries or LIST_BYTES of parts are reached.
MOVE      source bytes, target bytes, overwrite u8                  -                              entry
REMOVE    path bytes, recursive u8                                  -                              -
MKDIR     path bytes, parents u8                                    -                              entry
WATCH     path bytes, recursive u8                                  n u32, n times (kind u8, path bytes)    -
          kind: 1 created, 2 changed, 3 removed, 4 moved from, 5 moved to, 6 overflow. Runs until cancelled. A first
          part with n = 0 says it watches.
CANCEL    id u32                                                    -                              -
          Is an ask with an id of its own, answered by OK, also where the other ask is not known (any more).
          entry: path bytes, type u8 (1 file, 2 directory, 3 link, 4 other), mode u32, size u64, mtime_ns i64, target
          bytes

ERROR     errno u32, words bytes

Escaped streams (serial lines, and streams that a snapshot may cut in the middle of a frame; envd/guest/escape.py,
envd/native/guest_escape.c): 0xFF goes as 0xFF 0x00; a new server first sends a reset, 0xFF 0x01 and 7 random bytes
below 0xFF, and skips what it reads until the agent sends the same back. The agent drops half frames, unsent answers and
the asks of the server before; processes and the shell live on.

Paths are resolved by openat2 with RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS from the workspace; a leading "/workspace" is
the root itself. Opens never block (O_NONBLOCK) and READ refuses what is no regular file (EISDIR, ENXIO).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

VERSION = 1
MAX_FRAME = 8 * 1024 * 1024
CHUNK = 1024 * 1024
"""Bytes of file or output data in one frame."""
LIST_BYTES = 16 * 1024 * 1024
"""Bytes that all parts of one LIST may hold."""
HEAD = struct.Struct("<IIB")


class Ask(IntEnum):
    """What a server asks."""

    INIT = 1
    SHELL = 2
    START = 3
    OUTPUT = 4
    WAIT = 5
    PROCESSES = 6
    STDIN = 7
    CLOSE_STDIN = 8
    SIGNAL = 9
    RESIZE = 10
    READ = 20
    WRITE = 21
    STAT = 22
    LIST = 23
    MOVE = 24
    REMOVE = 25
    MKDIR = 26
    WATCH = 27
    CANCEL = 42


class Answer(IntEnum):
    """What an agent answers with."""

    PART = 100
    OK = 101
    ERROR = 102


class ProtocolError(ValueError):
    """The peer sent what the protocol does not allow."""


class Writer:
    """Builds the fields of a frame."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def u8(self, value: int) -> Writer:
        """Append an unsigned byte."""
        self._parts.append(struct.pack("<B", value))
        return self

    def u32(self, value: int) -> Writer:
        """Append 32 unsigned bits."""
        self._parts.append(struct.pack("<I", value))
        return self

    def u64(self, value: int) -> Writer:
        """Append 64 unsigned bits."""
        self._parts.append(struct.pack("<Q", value))
        return self

    def i64(self, value: int) -> Writer:
        """Append 64 signed bits."""
        self._parts.append(struct.pack("<q", value))
        return self

    def data(self, value: bytes) -> Writer:
        """Append bytes with their length."""
        self._parts += (struct.pack("<I", len(value)), value)
        return self

    def items(self, values: Sequence[bytes]) -> Writer:
        """Append a list of bytes."""
        self.u32(len(values))
        for value in values:
            self.data(value)
        return self

    def body(self) -> bytes:
        """The fields alone."""
        return b"".join(self._parts)


class Reader:
    """Takes a frame's fields apart. Raises ProtocolError where they do not fit."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self._at = 0

    def _take(self, form: str, size: int) -> int:
        if self._at + size > len(self._body):
            raise ProtocolError("a frame ends within a field")
        (value,) = struct.unpack_from(form, self._body, self._at)
        self._at += size
        return int(value)

    def u8(self) -> int:
        """An unsigned byte."""
        return self._take("<B", 1)

    def u32(self) -> int:
        """32 unsigned bits."""
        return self._take("<I", 4)

    def u64(self) -> int:
        """64 unsigned bits."""
        return self._take("<Q", 8)

    def i32(self) -> int:
        """32 signed bits."""
        return self._take("<i", 4)

    def i64(self) -> int:
        """64 signed bits."""
        return self._take("<q", 8)

    def data(self) -> bytes:
        """Bytes with their length."""
        size = self.u32()
        if self._at + size > len(self._body):
            raise ProtocolError("a frame ends within a field")
        found = bytes(self._body[self._at : self._at + size])
        self._at += size
        return found

    def items(self) -> list[bytes]:
        """A list of bytes."""
        count = self.u32()
        if count * 4 > len(self._body) - self._at:
            raise ProtocolError("a list is longer than its frame")
        return [self.data() for _ in range(count)]

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._body):
            raise ProtocolError("a frame has trailing bytes")
