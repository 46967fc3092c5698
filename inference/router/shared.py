"""Routers of one fleet agree through a Redis stream: requests in flight, where prompts went, cache events.

    own requests, events followed --every FLUSH_S, one entry--> stream --XREAD--> the other routers' entries --> Router

Decisions stay local: without Redis each router goes on with what it knows, and forgets the others' requests in flight
after LOST_S. An entry states all requests in flight of its router, so that a lost one is made good by the next. Of a
prompt it has only what its replica lacked; a router that misses the blocks before ignores them. A router that joins
reads what the stream still has. Whoever may write the stream is trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.errors import ConfigError
from inference.errors import RouterError
from inference.router.router import Decision, Router
from inference.router.wire import WireDecoder, require

FLUSH_S = 0.01
"""Seconds for which news are collected before they are sent."""
BEAT_S = 1.0
"""Seconds after which a router without news repeats its requests in flight."""
LOST_S = 10.0
"""Seconds without an entry of a router after which its requests in flight count no more."""
ENTRIES = 20_000
"""Entries that the stream keeps, about."""
WAITING = 50_000
"""Prompts and batches that wait for Redis, at most; the oldest ones are dropped."""
_PAUSES_S = (0.1, 2.0)
"""First and longest pause before Redis is asked again."""
_TIMEOUT_S = 2.0
_ROUND = 256
"""News in one entry, at most; entries read at once."""
_log = logging.getLogger(__name__)


@dataclass
class Counters:
    """What happened to entries since the start."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    """Prompts and batches that were not sent, since Redis was away too long."""
    unreadable: int = 0
    """Entries and batches that are none of ours, and were ignored."""
    failures: int = 0
    """Calls of Redis that failed."""


class SharedRouter:
    """Tells the other routers of a fleet what one does, and that one what they do. Belongs to the router's event loop.

    Routers of other block sizes or other keys have streams of their own.
    """

    def __init__(
        self, router: Router, url: str, fleet: str = "default", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """url: redis://[:password@]host:port/db, rediss:// or unix://. fleet: name of the routers that agree.

        Raises ConfigError for an unusable URL, and without the package redis.
        """
        redis = require("redis.asyncio", extra="redis")
        self._errors: tuple[type[Exception], ...] = (require("redis", extra="redis").RedisError, OSError)
        self._refused = require("redis.exceptions", extra="redis").AuthenticationError
        msgpack = require("msgspec.msgpack", extra="redis")
        self._packer, self._unpack = msgpack.Encoder(), msgpack.decode
        try:
            self._redis = redis.from_url(url, protocol=2, socket_connect_timeout=_TIMEOUT_S, socket_timeout=_TIMEOUT_S)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"no address of a Redis server: {error}; write redis://HOST:PORT/0") from None
        self._router, self._clock = router, clock
        config = router.config
        secret = hashlib.sha256(f"stream {config.key}".encode()).hexdigest()[:16]
        self.stream = f"triplane:routers:{fleet}:{config.block_tokens}:{secret}"
        self.name = uuid.uuid4().hex
        """Of this router in entries."""
        self.counters = Counters()
        self._news: deque[tuple[Any, ...]] = deque()
        self._others: dict[str, float] = {}
        """Router -> time of its last entry."""
        self._sources: dict[str, str] = {}
        """Replica -> the router whose cache events of it are applied."""
        self._decoders: dict[str, WireDecoder] = {}
        self._followed: set[str] = set()
        """Replicas whose cache events this router receives itself."""
        self._last: bytes | str = "0"
        self._told: dict[str, tuple[int, int]] = {}
        self._away = self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        router.begun = self._begun

    async def start(self) -> None:
        """Read what the stream has, as far as Redis answers, and go on in the background.

        Raises ConfigError if Redis refuses the password.
        """
        try:
            await self._redis.ping()
        except self._errors as error:
            # the client wraps it where it fails while it connects
            if isinstance(error, self._refused) or isinstance(error.__cause__, self._refused):
                await self._redis.aclose()
                raise ConfigError(f"Redis refuses the user or the password of its URL: {error}") from None
            self._failed(error)
        self._tasks = [asyncio.create_task(each) for each in (self._kept(self._send), self._kept(self._receive))]

    async def close(self) -> None:
        """Say that this router has nothing in flight any more, if Redis answers, and stop. Idempotent."""
        self._closing = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            try:
                await self._add({"in_flight": {}})
            except self._errors:
                pass  # the others forget it after LOST_S
            await self._redis.aclose()

    def forward(self, replica: str, number: bytes, payload: bytes) -> None:
        """Pass a batch of cache events on, as vLLM publishes them (`inference.router.wire`), that was applied here."""
        self._followed.add(replica)
        self._tell("events", replica, number, payload)

    def _begun(self, decision: Decision) -> None:
        had = self._router.residency.assumed(decision.replica, decision.depths)
        parent = decision.hashes.item(had - 1) if had else None
        self._tell("prompt", decision.replica, parent, decision.hashes[had:].tobytes())

    def _tell(self, *news: Any) -> None:
        self._news.append(news)
        if len(self._news) > WAITING:
            self._news.popleft()
            self.counters.dropped += 1

    async def _kept(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work`; after a failure with pauses."""
        pause = _PAUSES_S[0]
        while not self._closing:  # a cancellation may be lost within the client
            try:
                await work()
            except self._errors as error:
                self._failed(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSES_S[1])
            else:
                pause = _PAUSES_S[0]
                if self._away:
                    self._away = False
                    _log.warning("Redis answers again: routers share what they do")

    def _failed(self, error: Exception) -> None:
        self.counters.failures += 1
        if not self._away:
            self._away = True
            _log.warning("Redis fails (%s): routing goes on by what this router does itself; said once", error)

    async def _send(self) -> None:
        """Send the news of FLUSH_S, or the requests in flight after BEAT_S without any."""
        waited = 0.0
        while waited < BEAT_S and not self._news and self._router.in_flight() == self._told:
            await asyncio.sleep(FLUSH_S)
            waited += FLUSH_S
        if not waited:
            await asyncio.sleep(FLUSH_S)
        news = [self._news.popleft() for _ in range(min(_ROUND, len(self._news)))]
        told = self._router.in_flight()
        try:
            await self._add({"in_flight": told, "news": news})
        except self._errors:
            self._news.extendleft(reversed(news))
            raise
        self._told = told

    async def _add(self, message: dict[str, Any]) -> None:
        await self._redis.xadd(
            self.stream, {"from": self.name, "data": self._packer.encode(message)}, maxlen=ENTRIES, approximate=True
        )
        self.counters.sent += 1

    async def _receive(self) -> None:
        """Apply the next entries of others."""
        seconds, micros = await self._redis.time()
        found = await self._redis.xread({self.stream: self._last}, count=_ROUND, block=int(_TIMEOUT_S * 500))
        now = self._clock()
        for each, heard in [*self._others.items()]:
            if now - heard > LOST_S:
                self._forget(each)
        for entry, fields in found[0][1] if found else ():
            self._last = entry
            sender = fields.get(b"from", b"").decode(errors="replace")
            if sender == self.name:
                continue
            age = max(0.0, seconds + micros / 1e6 - int(entry.partition(b"-")[0]) / 1e3)
            try:
                self._apply(sender, self._unpack(fields.get(b"data", b"")), age)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._unreadable(f"{self.stream} has an entry that is none of a router: {error}")
            await asyncio.sleep(0)

    def _apply(self, sender: str, message: Any, age: float) -> None:
        """Apply an entry of another router that is `age` seconds old."""
        loads = {str(name): (int(tokens), int(computing)) for name, (tokens, computing) in message["in_flight"].items()}
        self.counters.received += 1
        if age < LOST_S:
            self._others[sender] = self._clock() - age
            self._router.elsewhere(sender, loads)
        for kind, replica, *rest in message.get("news", ()):
            if replica not in self._router.replicas:
                continue
            if kind == "prompt":
                parent, hashes = rest
                self._router.assume(replica, parent, np.frombuffer(hashes, np.uint64).tolist(), age)
            elif kind == "events" and replica not in self._followed:
                self._followed_elsewhere(sender, replica, *rest)

    def _followed_elsewhere(self, sender: str, replica: str, number: bytes, payload: bytes) -> None:
        """Apply a batch of cache events. One router's at a time: another's may begin anew, which is no restart."""
        source = self._sources.setdefault(replica, sender)
        if source != sender and source not in self._others:
            source = self._sources[replica] = sender
        if source != sender:
            return
        decoder = self._decoders.setdefault(replica, WireDecoder())
        try:
            self._router.apply(replica, decoder.batch(number, payload))
        except RouterError as error:
            self._unreadable(f"{replica}: a batch of cache events is left out: {error}")

    def _unreadable(self, fault: str) -> None:
        self.counters.unreadable += 1
        if self.counters.unreadable == 1:
            _log.warning("%s; said once", fault)

    def _forget(self, router: str) -> None:
        del self._others[router]
        self._router.elsewhere(router, {})
