"""Asks that wait for their answers."""

from __future__ import annotations

import asyncio
import os
from collections import deque

from envd.guest.protocol import ProtocolError, Reader

MAX_WORDS = 4096
"""Bytes of an error's words."""


class Waiting:
    """An ask that is not answered yet."""

    __slots__ = ("bound", "due", "future", "lost", "parts", "queue", "queued", "sent", "wake")

    def __init__(self, future: asyncio.Future[bytes], bound: int, due: float, parts: list[bytes] | None) -> None:
        self.future = future
        self.bound = bound
        """Bytes that may still come."""
        self.due = due
        self.parts = parts
        self.queue: deque[bytes] | None = None
        self.queued = 0
        """Bytes of the queue."""
        self.wake: asyncio.Future[None] | None = None
        self.lost = False
        """Parts were dropped: nobody read them."""
        self.sent = False


def wake(waiting: Waiting) -> None:
    """Have the reader of parts look again."""
    if waiting.wake is not None and not waiting.wake.done():
        waiting.wake.set_result(None)


def fail(waiting: Waiting, error: Exception) -> None:
    """End an ask by an error."""
    if not waiting.future.done():
        waiting.future.set_exception(error)
        if waiting.queue is not None:
            waiting.future.exception()  # it may be read by nobody
    wake(waiting)


def read_error(body: bytes) -> OSError:
    """An ERROR's fields."""
    reader = Reader(body)
    code, words = reader.u32(), reader.data()
    reader.end()
    if not 0 < code < 4096 or len(words) > MAX_WORDS:
        raise ProtocolError("an error is malformed")
    return OSError(code, words.decode("utf-8", "replace") or os.strerror(code))
