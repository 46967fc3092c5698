"""Follow the cache events of replicas over ZMQ, as vLLM and SGLang publish them.

    replay from 0 --> router.apply <-- published batches     a gap: replay from there; what is not replayed is lost, and
                                                             the replica counts as empty before the next batch

A number that comes again with another payload shows a restart: numbers begin at 0 then, and the replica is empty. To
see that behind a gap, too, the last batch applied is replayed with those after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from inference.errors import RouterError
from inference.router.router import Router
from inference.router.wire import END, WireDecoder, require

REPLAY_S = 5.0
"""Seconds without a message of a replay after which it counts as failed."""
_RECONNECT_MS = 2000
"""Longest pause between two attempts to connect."""
_SEEN = 1 << 14
"""Batches whose payloads are recognized when they come again."""
_ROUND = 64
"""Batches applied at once; then other tasks of the event loop run."""
Forward = Callable[[str, bytes, bytes], None]
"""Called with a replica, and sequence number and payload of a batch."""
_log = logging.getLogger(__name__)


class Subscriptions:
    """Follows the events of the replicas that serve. Belongs to one event loop."""

    def __init__(self, router: Router, port: int | None) -> None:
        """port: where the host of each replica of `sync` publishes; None: `sync` follows none. Raises ConfigError if a
        package is missing.
        """
        self._router, self._port = router, port
        self.forward: Forward | None = None
        """Gets each batch that was applied."""
        self._followed: dict[str, EventSubscriber] = {}
        if port is not None:
            require_packages()

    def sync(self, serving: Mapping[str, str]) -> None:
        """Follow exactly these replicas, with their URLs by name, which are added to the router."""
        if self._port is None:
            return
        for name in set(self._followed) - set(serving):
            self.leave(name)
        for name, address in serving.items():
            if name not in self._router.replicas:
                self._router.add(name)
            self.follow(name, address, self._port)

    def follow(self, name: str, address: str, port: int) -> None:
        """Follow a replica that the router has, unless it is followed. See EventSubscriber."""
        if name not in self._followed:
            self._followed[name] = EventSubscriber(self._router, name, address, port, self.forward)

    def leave(self, name: str) -> None:
        """Stop following a replica, if it is followed."""
        if name in self._followed:
            self._followed.pop(name).task.cancel()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        tasks = [each.task for each in self._followed.values()]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def require_packages() -> None:
    """Raise ConfigError if a package that reads events is missing."""
    require("zmq")
    require("msgspec")


class EventSubscriber:
    """Follows one replica until `task` is cancelled. The router must have it until then. Belongs to one event loop."""

    def __init__(self, router: Router, name: str, address: str, port: int, forward: Forward | None = None) -> None:
        """address: URL of the replica, whose host publishes at `port` and replays at the next one. forward: gets each
        batch that was applied.

        Raises ConfigError without pyzmq.
        """
        self._router, self._name, self._forward = router, name, forward
        host = httpx.URL(address).host
        host = f"[{host}]" if ":" in host else host
        self._events, self._replay = f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}"
        self._zmq, self._asyncio = require("zmq"), require("zmq.asyncio")
        self._decoder = WireDecoder()
        self._context: Any = None
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Number -> hash of the payload, of the last batches."""
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        self._context = self._asyncio.Context()
        try:
            await self._follow()
        finally:
            self._context.destroy(linger=0)

    async def _follow(self) -> None:
        published = self._socket(self._zmq.SUB, self._events)
        published.setsockopt(self._zmq.SUBSCRIBE, b"")
        try:
            await self._recover()
            while True:
                _, number, payload = await published.recv_multipart()
                awaited = self._router.residency.awaited(self._name)
                if int.from_bytes(number, "big") < awaited:
                    if self._is_seen(number, payload):
                        continue
                    self._restarted()
                if int.from_bytes(number, "big") > self._router.residency.awaited(self._name):
                    await self._recover()
                self._apply(number, payload)
        except (RouterError, ValueError) as error:
            _log.warning("%s: its cache events are not followed any more: %s", self._name, error)
            if self._name in self._router.replicas:
                self._router.restarted(self._name)

    async def _recover(self) -> None:
        """Apply the batches after the last one, as far as the replica still has them."""
        last = self._router.residency.awaited(self._name) - 1
        replayed = await self._replayed(max(0, last))
        if last >= 0 and replayed and int.from_bytes(replayed[0][0], "big") == last and not self._is_seen(*replayed[0]):
            self._restarted()
            replayed = await self._replayed(0)
        for count, (number, payload) in enumerate(replayed, 1):
            self._apply(number, payload)
            if count % _ROUND == 0:
                await asyncio.sleep(0)

    def _apply(self, number: bytes, payload: bytes) -> None:
        """Apply a batch unless that was done."""
        batch = self._decoder.batch(number, payload)
        if batch.sequence < self._router.residency.awaited(self._name):
            return
        self._router.apply(self._name, batch)
        if self._forward is not None:
            self._forward(self._name, number, payload)
        self._seen[batch.sequence] = hash(payload)
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def _is_seen(self, number: bytes, payload: bytes) -> bool:
        """Whether this very batch was applied."""
        return self._seen.get(int.from_bytes(number, "big")) == hash(payload)

    def _restarted(self) -> None:
        _log.warning("%s has restarted: its cache counts as empty", self._name)
        self._router.restarted(self._name)
        self._seen.clear()

    async def _replayed(self, first: int) -> list[tuple[bytes, bytes]]:
        """(number, payload) of batches from `first`; those received so far, if the replica stops sending."""
        asked, found = self._socket(self._zmq.DEALER, self._replay), list[tuple[bytes, bytes]]()
        try:
            await asked.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames: list[bytes] = await asked.recv_multipart()
                if len(frames) < 3 or frames[-2] == END:
                    return found
                found.append((frames[-2], frames[-1]))
        except TimeoutError:
            return found
        finally:
            asked.close(linger=0)

    def _socket(self, kind: int, endpoint: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.RCVHWM, 0)
        made.setsockopt(self._zmq.IPV6, 1)
        made.setsockopt(self._zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
        made.connect(endpoint)
        return made
