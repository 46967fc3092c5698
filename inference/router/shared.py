"""Routers of a fleet share their state through a Redis stream: requests in flight, prompts sent, cache events.

    own requests and cache events --an entry every FLUSH_S--> Redis stream --XREAD--> the other routers

Decisions stay local: without Redis each router continues with what it knows, and after LOST_S ignores the requests in
flight of the others. Each entry contains all requests in flight of its router, so that the next entry replaces a lost
one. Of a prompt, it contains only the blocks that the replica was not assumed to have; a router that does not know the
preceding blocks ignores them. A router that joins reads the entries that the stream still has. Every client that can
write to the stream is trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.digests import digest_of
from contracts.errors import ConfigError
from inference.errors import RouterError
from inference.router.router import Decision, Router
from inference.router.score import InFlight
from inference.router.subscriber import Subscriptions
from inference.router.wire import WireDecoder, require

FLUSH_S = 0.01
"""Seconds for which updates are collected into one entry."""
BEAT_S = 1.0
"""Heartbeat interval of a router without updates, in seconds."""
LOST_S = 10.0
"""Seconds without an entry of a router after which its requests in flight no longer count."""
ENTRIES = 20_000
"""Approximate maximum length of the stream, in entries."""
WAITING = 50_000
"""Maximum number of prompts and batches that wait for Redis; beyond it the oldest are dropped."""
_PAUSES_S = (0.1, 2.0)
"""Initial and maximum backoff after a failed Redis call, in seconds."""
_TIMEOUT_S = 2.0
_ROUND = 256
"""Maximum number of updates in one entry, and of entries in one read."""
_log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Counts since the start, of entries unless stated."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    """Prompts and batches dropped because Redis was unavailable for too long."""
    unreadable: int = 0
    """Entries and batches that could not be decoded or applied, and were ignored."""
    failures: int = 0
    """Failed Redis calls."""


def shared_by(
    variable: str | None, servers: Sequence[str | None], router: Router, events: Subscriptions
) -> SharedRouter | None:
    """Shares the state of an engine's router with other processes that sample from the same servers, and forwards its
    cache events to them. None without `variable`.

    variable: name of the environment variable with the URL of Redis. Raises ConfigError if it is not set, and as
    SharedRouter.
    """
    if variable is None:
        return None
    url = os.environ.get(variable, "").strip()
    if not url:
        raise ConfigError(f"engine.redis_env names ${variable}, which is not set: set it to redis://HOST:PORT/0")
    shared = SharedRouter(router, url, f"servers {digest_of(list(servers))[:16]}")
    events.forward = shared.forward
    return shared


class SharedRouter:
    """Publishes the state of one router to the others of its fleet, and applies theirs. Belongs to the router's event
    loop.

    Routers with another block size or key use another stream.
    """

    def __init__(
        self, router: Router, url: str, fleet: str = "default", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """url: redis://[:password@]host:port/db, rediss:// or unix://. fleet: name of the group of
        routers that share their state.

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
        """This router's name in entries."""
        self.counters = Counters()
        self._updates: deque[tuple[Any, ...]] = deque()
        self._others: dict[str, float] = {}
        """Router -> time of its last entry."""
        self._sources: dict[str, str] = {}
        """Replica -> the router from which its cache events are applied."""
        self._decoders: dict[str, WireDecoder] = {}
        self._followed: set[str] = set()
        """Replicas whose cache events this router receives from the replica."""
        self._last: bytes | str = "0"
        """Id of the last entry read."""
        self._sent_changes = 0
        """`Router.changes` in the last entry sent."""
        self._away = self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        router.begun = self._begun

    async def start(self) -> None:
        """Begin to read and write the stream, in the background; also while Redis is unavailable. Idempotent.

        Raises ConfigError if Redis refuses the password.
        """
        if self._tasks:
            return
        try:
            await self._redis.ping()
        except self._errors as error:
            # redis-py wraps an AuthenticationError during connection setup in a ConnectionError
            if isinstance(error, self._refused) or isinstance(error.__cause__, self._refused):
                await self._redis.aclose()
                raise ConfigError(f"Redis refuses the user or the password of its URL: {error}") from None
            self._failed(error)
        self._tasks = [asyncio.create_task(each) for each in (self._kept(self._send), self._kept(self._receive))]

    async def close(self) -> None:
        """Stop, and publish that this router has no requests in flight, if Redis is available. Idempotent."""
        self._closing = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            try:
                await self._add({"in_flight": {}})
            except self._errors:
                pass  # the others do so after LOST_S
            await self._redis.aclose()

    def forward(self, replica: str, number: bytes, payload: bytes) -> None:
        """Publish a batch of cache events that was applied here, in vLLM's format (`inference.router.wire`)."""
        self._followed.add(replica)
        self._publish("events", replica, number, payload)

    def _begun(self, decision: Decision) -> None:
        had = self._router.residency.assumed(decision.replica, decision.depths)
        parent = decision.hashes.item(had - 1) if had else None
        self._publish("prompt", decision.replica, parent, decision.hashes[had:].tobytes())

    def _publish(self, *update: Any) -> None:
        self._updates.append(update)
        if len(self._updates) > WAITING:
            self._updates.popleft()
            self.counters.dropped += 1

    async def _kept(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` until the end, with a backoff after failures."""
        pause = _PAUSES_S[0]
        while not self._closing:  # redis-py may swallow a cancellation
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
        """Send one entry: the updates of FLUSH_S, or after BEAT_S without changes a heartbeat."""
        waited = 0.0
        while waited < BEAT_S and not self._updates and self._router.changes == self._sent_changes:
            await asyncio.sleep(FLUSH_S)
            waited += FLUSH_S
        if not waited:
            await asyncio.sleep(FLUSH_S)
        updates = [self._updates.popleft() for _ in range(min(_ROUND, len(self._updates)))]
        changes = self._router.changes
        try:
            await self._add({"in_flight": self._router.in_flight(), "updates": updates})
        except self._errors:
            self._updates.extendleft(reversed(updates))
            raise
        self._sent_changes = changes

    async def _add(self, message: dict[str, Any]) -> None:
        await self._redis.xadd(
            self.stream, {"from": self.name, "data": self._packer.encode(message)}, maxlen=ENTRIES, approximate=True
        )
        self.counters.sent += 1

    async def _receive(self) -> None:
        """Apply the next entries of other routers."""
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
        loads = {
            str(name): InFlight(int(requests), int(tokens), int(computing))
            for name, (requests, tokens, computing) in message["in_flight"].items()
        }
        self.counters.received += 1
        if age < LOST_S:
            self._others[sender] = self._clock() - age
            self._router.elsewhere(sender, loads)
        for kind, replica, *rest in message.get("updates", ()):
            if replica not in self._router.replicas:
                continue
            if kind == "prompt":
                parent, hashes = rest
                self._router.assume(replica, parent, np.frombuffer(hashes, np.uint64).tolist(), age)
            elif kind == "events" and replica not in self._followed:
                self._apply_events(sender, replica, *rest)

    def _apply_events(self, sender: str, replica: str, number: bytes, payload: bytes) -> None:
        """Apply a batch of cache events of a replica, from one router at a time: batch 0 from another router is no
        restart of the replica.
        """
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
