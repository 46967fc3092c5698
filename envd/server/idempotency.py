"""Answers of calls with an idempotency key: a retry gets the first call's answer and does not repeat the work."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from contracts.rpc import caller
from envd.errors import IdempotencyError

MAX_KEY = 200
_LIFETIME_S = 600.0


@dataclass
class _Kept:
    request: bytes
    task: asyncio.Task[Any] | None
    """None once the call is done."""
    reply: Message | None = None
    """None while the call runs, or if the reply is too large to be kept."""
    size: int = 0
    at: float = 0.0


class Answers:
    """Kept answers of one sandbox, or of a server's calls that name no sandbox.

    Each bearer key has its own. They are bounded in number, bytes and age. Failures are not kept.
    """

    def __init__(self, most: int = 256, most_bytes: int = 4 << 20, lifetime_s: float = _LIFETIME_S) -> None:
        self._most, self._most_bytes, self._lifetime_s = most, most_bytes, lifetime_s
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        self._forget_old()
        return len(self._kept)

    async def once(self, key: str, request: Message, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run the work for the first call with a key and return its answer; a retry waits for that answer.

        The work continues when its caller is cancelled, so that a retry can get its answer. Raises IdempotencyError for
        an invalid key, a key of another request, an answer that was too large to be kept, or too many running calls.
        """
        if not 0 < len(key) <= MAX_KEY:
            raise IdempotencyError(f"an idempotency key has 1 to {MAX_KEY} characters, this one has {len(key)}")
        self._forget_old()
        said = _digest(request)
        whose = (caller.key(), key)
        kept = self._kept.get(whose) or self._begin(whose, said, work)
        if kept.request != said:
            raise IdempotencyError(f"idempotency key {key!r} was used for another request: use a new key")
        if kept.task is not None:
            return await asyncio.shield(kept.task)
        if kept.reply is None:
            words = f"its answer of {kept.size} bytes was too large to be kept: ask for the state it left"
            raise IdempotencyError(f"the call with idempotency key {key!r} has run, but {words}")
        return kept.reply

    def _begin(self, key: tuple[str, str], said: bytes, work: Callable[[], Awaitable[Any]]) -> _Kept:
        while len(self._kept) >= self._most:
            if not self._forget_one():
                raise IdempotencyError(f"{self._most} calls with idempotency keys run already: wait for one to end")
        task = asyncio.ensure_future(_awaited(work))
        kept = self._kept[key] = _Kept(said, task)
        task.add_done_callback(lambda done: self._ended(key, kept, done))
        return kept

    def _ended(self, key: tuple[str, str], kept: _Kept, done: asyncio.Task[Any]) -> None:
        kept.task = None
        if done.cancelled() or done.exception() is not None:
            del self._kept[key]
            return
        kept.size, kept.at = done.result().ByteSize(), time.monotonic()
        if kept.size <= self._most_bytes // 4:
            kept.reply = done.result()
            self._bytes += kept.size
        while self._bytes > self._most_bytes and self._forget_one():
            pass

    def _forget_old(self) -> None:
        limit = time.monotonic() - self._lifetime_s
        for key, kept in list(self._kept.items()):
            if kept.task is None and kept.at < limit:
                self._forget(key)

    def _forget_one(self) -> bool:
        oldest = next((key for key, kept in self._kept.items() if kept.task is None), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _forget(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key)
        if kept.reply is not None:
            self._bytes -= kept.size


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def _digest(request: Message) -> bytes:
    whole = hashlib.sha256(request.DESCRIPTOR.full_name.encode() + b"\0")
    whole.update(request.SerializeToString(deterministic=True))
    return whole.digest()
