"""The agent's end of the stream: frames in, answers out, no more asks read than the server takes answers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from envd.guest.loop import READ, WRITE, Loop
from envd.guest.protocol import HEAD, MAX_FRAME, Answer, ProtocolError, Writer

_HIGH_WATER = 4 * 1024 * 1024
"""Bytes of answers that wait for the server; no more asks are read then."""


class Stream:
    """Frames over one descriptor, or two. serve: takes (id, kind, fields)."""

    def __init__(self, loop: Loop, reading: int, writing: int, serve: Callable[[int, int, bytes], None]) -> None:
        self._loop, self._in, self._out, self._serve = loop, reading, writing, serve
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._received, self._unsent = bytearray(), bytearray()

    @property
    def crowded(self) -> bool:
        """The server takes less than it is sent."""
        return len(self._unsent) > _HIGH_WATER

    def answer(self, identity: int, body: bytes = b"", kind: int = Answer.OK) -> None:
        """Send an answer, or a part of one."""
        self._unsent += HEAD.pack(len(body) + 5, identity, kind) + body
        self.flush()

    def fail(self, identity: int, error: OSError) -> None:
        """Answer with an error."""
        words = os.fsencode(error.strerror or str(error))[:1024]
        self.answer(identity, Writer().u32(error.errno or errno.EIO).data(words).body(), Answer.ERROR)

    def flush(self) -> None:
        """Send what the server takes; listen while it takes enough."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._out, self._unsent[: 1 << 18])]
        except BlockingIOError:
            pass
        reads = READ if len(self._unsent) <= _HIGH_WATER else 0
        writes = WRITE if self._unsent else 0
        if self._in == self._out:
            self._loop.watch(self._in, self._ready, reads | writes)
            return
        for fd, call, events in ((self._in, self._receive, reads), (self._out, self._ready, writes)):
            if events:
                self._loop.watch(fd, call, events)
            else:
                self._loop.unwatch(fd)

    def _ready(self) -> None:
        if self._unsent:
            self.flush()
            self._serve_received()
        if len(self._unsent) <= _HIGH_WATER and self._in == self._out:
            self._receive()

    def _receive(self) -> None:
        try:
            data = os.read(self._in, 1 << 18)
        except BlockingIOError:
            return
        if not data:
            self._loop.stop()
            return
        self._received += data
        self._serve_received()

    def _serve_received(self) -> None:
        """Serve what has come, as long as the server takes the answers."""
        at = 0
        while len(self._received) - at >= HEAD.size and len(self._unsent) <= _HIGH_WATER:
            length, identity, kind = HEAD.unpack_from(self._received, at)
            if not 5 <= length <= MAX_FRAME or not identity:
                raise ProtocolError("a frame beyond the bounds")
            end = at + 4 + length
            if end > len(self._received):
                break
            self._serve(identity, kind, bytes(self._received[at + HEAD.size : end]))
            at = end
        del self._received[:at]
