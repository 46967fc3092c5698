"""Run the server: open a policy or wait for one, listen, drain on SIGTERM (`draining`), stop on SIGINT."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from contracts.tracing import service
from inference.engines.base import watch
from inference.engines.builtin import BuiltinEngine
from inference.fleet.joining import Joining, joined
from inference.router.publisher import EventPublisher
from inference.server.app import Application, Opener
from inference.server.draining import DrainingServer
from inference.server.follow import Source, follow
from inference.server.listening import announced, beside, split_address


@dataclass(frozen=True)
class Following:
    """Source of the policy to serve from now on."""

    source: Source
    poll_s: float
    """Seconds between two polls."""
    wait_s: float = math.inf
    """Longest wait for the first policy, in seconds."""


@dataclass(frozen=True)
class Serving:
    """How a policy is served."""

    listen: str
    """host:port; port 0 picks a free one."""
    model: str = "policy"
    """Name in /v1/models."""
    max_batch: int = 256
    """Largest number of sequences in a batch."""
    threads: int | None = None
    """Torch threads; None for its default."""
    drain_s: float = 0.0
    """Seconds in which requests are still accepted after SIGTERM."""
    events_port: int | None = None
    """Port for the events of the prefix cache; they are replayed at the next one. None: they are not published."""
    join: tuple[str, ...] = ()
    """URLs of routers whose fleet this server joins."""
    advertise: str | None = None
    """URL at which those routers reach this server. None: where it listens."""

    def opener(self, publisher: EventPublisher | None) -> Opener:
        """Opens the engine of a policy."""

        def opened(directory: Path, version: str) -> BuiltinEngine:
            return BuiltinEngine(directory, version, max_batch=self.max_batch, threads=self.threads, publish=publisher)

        return opened


def serve(directory: Path, version: str, serving: Serving) -> None:
    """Serve a policy, until /v1/load_weights loads another one. Returns after a signal.

    Prints the address once it is ready. Raises EngineStopped if the engine fails.
    """
    split_address(serving.listen)
    with service("sampler"):
        asyncio.run(_serve(serving, (directory, version), None))


def serve_live(following: Following, serving: Serving) -> None:
    """Serve the policy that `following` names, and wait for the first one. Returns after a signal.

    Prints the address, and again with the policy once there is one. Raises ArtifactMissing if the wait is over,
    EngineStopped if the engine fails.
    """
    split_address(serving.listen)
    with service("sampler"):
        asyncio.run(_serve(serving, None, following))


async def _serve(serving: Serving, policy: tuple[Path, str] | None, following: Following | None) -> None:
    host, port = split_address(serving.listen)
    publisher = None if serving.events_port is None else EventPublisher(host, serving.events_port)
    app = Application(serving.opener(publisher), serving.model)
    server = DrainingServer(app.starlette(), host, port, app.readiness, serving.drain_s)
    try:
        if policy is not None:
            await app.open(*policy)
        async with (
            beside(server, _announce(server, app)),
            beside(server, watch(app.version)),
            beside(server, _join(server, app, serving)),
        ):
            if following is None:
                await server.run_until_told()
                return
            async with beside(server, follow(app, following.source, following.poll_s, following.wait_s)):
                await server.run_until_told()
    finally:
        await app.close()
        if publisher is not None:
            publisher.close()


async def _join(server: uvicorn.Server, app: Application, serving: Serving) -> None:
    """Be in the fleet until the server drains."""
    if not serving.join:
        return
    here = (await announced(server)).url
    async with joined(Joining(serving.join, serving.advertise or here, serving.max_batch)):
        while not app.readiness.draining:
            await asyncio.sleep(0.05)


async def _announce(server: uvicorn.Server, app: Application) -> None:
    here = (await announced(server)).url
    version, told = await app.version(), False
    while version is None:
        if app.readiness.waiting is not None and not told:
            told = True
            print(f"no policy yet at {here}/v1: /ready answers 503 until there is one", flush=True)
        await asyncio.sleep(0.02)
        version = await app.version()
    print(f"policy {version} at {here}/v1", flush=True)
