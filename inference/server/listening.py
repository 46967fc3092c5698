"""The address of a server, and work that goes on while it runs. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.addresses import Address, require_free
from contracts.errors import ConfigError
from contracts.rpc.connecting import is_local, is_rebindable
from inference.server.replies import error_reply


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port", where a server can listen. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {listen} is not host:port, e.g. 127.0.0.1:8000 (port 0 picks a free one)")
    require_free(host.strip("[]"), int(port), "--listen")
    return host.strip("[]"), int(port)


def own_hosts_only(app: ASGIApp, host: str) -> ASGIApp:
    """The application of a server at `host`; at loopback it refuses requests whose Host is a name in the DNS."""
    if not is_local(f"{host}:0"):
        return app

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        named = "" if scope["type"] == "lifespan" else Headers(scope=scope).get("host", "")
        if not is_rebindable(named):
            await app(scope, receive, send)
            return
        said = (
            f"Host {named[:80]!r} is not this machine's own, at which alone this server listens: send Host: localhost"
        )
        await error_reply(403, said, "foreign_host")(scope, receive, send)

    return checked


@asynccontextmanager
async def beside(server: uvicorn.Server, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the server runs; its failure ends the server and is raised."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            server.should_exit = True

    task = asyncio.create_task(work)
    task.add_done_callback(ended)
    try:
        yield
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome


async def announced(server: uvicorn.Server) -> Address:
    """Wait until the server listens, and return where."""
    while not server.started:
        await asyncio.sleep(0.02)
    return Address(*server.servers[0].sockets[0].getsockname()[:2])
