"""Runs a server until it is told to stop, or its parent dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import grpc

from contracts.pb import envd_pb2_grpc as rpc
from envd.client import CHANNEL_OPTIONS
from envd.errors import BackendUnavailable, EnvdError
from envd.sandbox import linux
from envd.server.sandboxes import Sandboxes
from envd.server.service import SandboxesService, ToolsService, VerifierService

_log = logging.getLogger("envd")


async def serve(listen: str, backend: str, *, state_dir: Path | None, with_parent: int | None) -> None:
    """Serve on `unix:/path` or `host:port`. With `with_parent` (its pid) it stops when that process dies."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if with_parent is not None:
        linux.die_with_parent(signal.SIGTERM)
        if os.getppid() != with_parent:
            return  # it died before the kernel was asked to watch it
    sandboxes = await Sandboxes.start(backend, state_dir)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    rpc.add_SandboxesServicer_to_server(SandboxesService(sandboxes), server)  # type: ignore[no-untyped-call]
    rpc.add_ToolsServicer_to_server(ToolsService(sandboxes), server)  # type: ignore[no-untyped-call]
    rpc.add_VerifierServicer_to_server(VerifierService(sandboxes), server)  # type: ignore[no-untyped-call]
    try:
        try:
            server.add_insecure_port(listen)
        except RuntimeError as error:
            raise EnvdError(f"envd can't listen on {listen}: {error}") from error
        await server.start()
        info = sandboxes.info()
        _log.info("listening on %s, backend %s, limits %s", listen, info.backend, ",".join(info.limits_enforced))
        waiting = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(sandboxes.zygote_died())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if not stop.is_set():
            raise BackendUnavailable("a zygote died: restart envd; the kernel's log tells whether memory ran out")
    finally:
        await server.stop(grace=0.5)
        await sandboxes.stop()
