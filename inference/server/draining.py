"""End a server on SIGTERM without a failed request.

    SIGTERM -> /ready is 503, replies close their connections -> drain_s later: no new connections -> requests in
               flight end, within FINISH_S -> exit 0

Whoever sends requests learns only after a moment that a server is no longer ready, so requests are accepted meanwhile.
A second SIGTERM ends the wait. SIGINT (Ctrl-C) does not wait for others.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from types import FrameType
from typing import Any

import uvicorn

from contracts.http_connections import BoundedConnection
from contracts.processes import allow_open_files
from inference.server.listening import own_hosts_only
from inference.server.readiness import Readiness

POD_DRAIN_S = 5.0
"""Default of `--drain` in a pod: what Kubernetes takes to remove an endpoint everywhere, with a margin."""
FINISH_S = 60.0
"""Seconds for requests in flight to end after the drain; then they are cancelled. A pod's
terminationGracePeriodSeconds must exceed the sum of both.
"""
_INTERRUPTED_S = 10
"""The same after Ctrl-C."""
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


def default_drain_s() -> float:
    """Seconds of `--drain` if the option is not given: 5 in a pod, else 0."""
    return POD_DRAIN_S if os.environ.get("KUBERNETES_SERVICE_HOST") else 0.0


class DrainingServer(uvicorn.Server):
    """A server that serves `app` and drains on SIGTERM."""

    def __init__(self, app: _App, host: str, port: int, readiness: Readiness, drain_s: float) -> None:
        """drain_s: seconds in which requests are still accepted after SIGTERM."""
        super().__init__(
            uvicorn.Config(
                own_hosts_only(_closing_connections(app, readiness), host),
                http=BoundedConnection,
                host=host,
                port=port,
                log_level="warning",
                timeout_graceful_shutdown=_INTERRUPTED_S,
            )
        )
        self._readiness, self._drain_s = readiness, drain_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_until_told(self) -> None:
        """Serve until a signal; a drain has ended when this returns. SIGINT is raised again, SIGTERM is not."""
        allow_open_files()
        self._loop = asyncio.get_running_loop()
        await self.serve()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler of uvicorn."""
        if sig != signal.SIGTERM or self._loop is None:
            super().handle_exit(sig, frame)
            return
        self.config.timeout_graceful_shutdown = int(FINISH_S)
        if self._readiness.draining or self._readiness.waiting is not None:
            self._stop()
            return
        self._readiness.draining = True
        print(f"draining: new requests are accepted for {self._drain_s:g} s more", flush=True)
        self._loop.call_soon_threadsafe(self._loop.call_later, self._drain_s, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def _closing_connections(app: _App, readiness: Readiness) -> _App:
    """The application, with `Connection: close` in replies during a drain: clients then connect elsewhere."""

    async def wrapped(scope: _Message, receive: _Receive, send: _Send) -> None:
        async def closing(message: _Message) -> None:
            if message["type"] == "http.response.start" and readiness.draining:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await app(scope, receive, closing)

    return wrapped
