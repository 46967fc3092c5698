"""Run the server: open a policy or wait for one, listen, drain on SIGTERM (`draining`), stop on SIGINT."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from contracts.artifacts import ArtifactRef, list_artifacts, open_artifact
from contracts.chat import ChatTokenizer
from contracts.errors import ArtifactMissing, ConfigError
from contracts.store import Store, open_store
from inference.engines.builtin import BuiltinEngine
from inference.server.app import Application
from inference.server.draining import DrainingServer
from inference.server.follow import Source, follow

CHECKPOINTS = ("checkpoint", "base_policy")
"""Kinds of artifacts that are checkpoints."""


def find_policy(policy: str, store: str | None) -> tuple[Path, str]:
    """Checkpoint directory and version of `policy`.

    policy: a directory, or the first digits (at least 6) of a checkpoint artifact's content digest or action key in the
    store.
    """
    directory = Path(policy)
    if directory.is_dir():
        return directory, directory.resolve().name
    if len(policy) < 6:
        raise ConfigError(f"--policy {policy}: no such directory, and too short for a digest (6 digits at least)")
    opened = open_store(store)
    ref = find_checkpoint(policy, opened, "--policy")
    return open_artifact(opened, ref).directory(), ref.digest


def find_checkpoint(digits: str, store: Store, option: str) -> ArtifactRef:
    """The only checkpoint whose content digest or action key starts with `digits`.

    option: of the command line, for messages. Raises ArtifactMissing, ConfigError.
    """
    found: dict[str, ArtifactRef] = {
        artifact.ref.digest: artifact.ref
        for kind in CHECKPOINTS
        for artifact in list_artifacts(store, kind)
        if artifact.ref.digest.startswith(digits) or artifact.ref.key.startswith(digits)
    }
    if not found:
        raise ArtifactMissing(f"{option} {digits}: neither a directory nor a checkpoint in store {store.url}")
    if len(found) > 1:
        raise ConfigError(f"{option} {digits} matches {len(found)} checkpoints of store {store.url}: give more digits")
    (ref,) = found.values()
    return ref


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--listen {listen} is not host:port, e.g. 127.0.0.1:8000 (port 0 picks a free one)")
    return host.strip("[]"), int(port)


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

    def open(self, directory: Path, version: str) -> tuple[BuiltinEngine, ChatTokenizer | None]:
        """Engine and tokenizer of a policy."""
        tokenizer = ChatTokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
        return BuiltinEngine(directory, version, max_batch=self.max_batch, threads=self.threads), tokenizer


def serve(directory: Path, version: str, serving: Serving) -> None:
    """Serve a policy, until /v1/load_weights loads another one. Returns after a signal.

    Prints the address once it is ready.
    """
    split_address(serving.listen)
    asyncio.run(_serve(serving, (directory, version), None))


def serve_live(following: Following, serving: Serving) -> None:
    """Serve the policy that `following` names, and wait for the first one. Returns after a signal.

    Prints the address, and again with the policy once there is one. Raises ArtifactMissing if the wait is over.
    """
    split_address(serving.listen)
    asyncio.run(_serve(serving, None, following))


async def _serve(serving: Serving, policy: tuple[Path, str] | None, following: Following | None) -> None:
    host, port = split_address(serving.listen)
    app = Application(serving.open, serving.model)
    server = DrainingServer(app.starlette(), host, port, app.readiness, serving.drain_s)
    try:
        if policy is not None:
            await app.open(*policy)
        async with beside(server, _announce(server, app)):
            if following is None:
                await server.run_until_told()
                return
            async with beside(server, follow(app, following.source, following.poll_s, following.wait_s)):
                await server.run_until_told()
    finally:
        await app.close()


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


async def _announce(server: uvicorn.Server, app: Application) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    version, told = await app.version(), False
    while version is None:
        if app.readiness.waiting is not None and not told:
            told = True
            print(f"no policy yet at http://{host}:{port}/v1: /ready answers 503 until there is one", flush=True)
        await asyncio.sleep(0.02)
        version = await app.version()
    print(f"policy {version} at http://{host}:{port}/v1", flush=True)
