"""Publish the cache events of an engine of ours over ZMQ, in vLLM's format."""

from __future__ import annotations

import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import Any

from contracts.errors import ConfigError
from inference.router.residency import Batch
from inference.router.wire import END, encode, require

STEPS = 10_000
"""Batches that are kept to be replayed; vLLM's default."""
_POLL_S = 0.05


class EventPublisher:
    """Publishes at `port`, and replays at the next one. All batches must come from one thread, whichever it is."""

    def __init__(self, host: str, port: int, steps: int = STEPS) -> None:
        """steps: batches that can be replayed. Raises ConfigError for a port in use, and without pyzmq."""
        self._zmq = require("zmq")
        require("msgspec")
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=steps)
        self._batches: SimpleQueue[Batch] = SimpleQueue()
        self._context = self._zmq.Context()
        self._publish = self._bound(self._zmq.PUB, host, port)
        self._replay = self._bound(self._zmq.ROUTER, host, port + 1)
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="cache-events", daemon=True)
        self._thread.start()

    def __call__(self, batch: Batch) -> None:
        """Publish a batch. Does not wait."""
        self._batches.put(batch)

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _work(self) -> None:
        while not self._closing:
            while self._replay.poll(0):
                self._answer(self._replay.recv_multipart())
            try:
                batch = self._batches.get(timeout=_POLL_S)
            except Empty:
                continue
            number, payload = encode(batch)
            self._publish.send_multipart((b"", number, payload))
            self._kept.append((number, payload))

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != len(END):
            return
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((client, b"", b"", number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))

    def _bound(self, kind: int, host: str, port: int) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.SNDHWM, 0)
        made.setsockopt(self._zmq.IPV6, 1)
        try:
            made.bind(f"tcp://{host}:{port}")
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cache events can't be published at {host}:{port}: {error}: choose another port"
            ) from None
        return made
