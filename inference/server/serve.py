"""Run the server: open a policy, listen, stop cleanly on SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
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


def serve(
    directory: Path,
    version: str,
    listen: str,
    *,
    model: str,
    max_batch: int,
    threads: int | None,
    following: Following | None = None,
) -> None:
    """Serve until interrupted.

    Prints the address once it is ready. following: None keeps the policy until /v1/load_weights.
    """
    host, port = split_address(listen)
    asyncio.run(_serve(directory, version, host, port, model, max_batch, threads, following))


async def _serve(
    directory: Path,
    version: str,
    host: str,
    port: int,
    model: str,
    max_batch: int,
    threads: int | None,
    following: Following | None,
) -> None:
    tokenizer = ChatTokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    engine = BuiltinEngine(directory, version, max_batch=max_batch, threads=threads)
    app = Application(engine, tokenizer, model)
    config = uvicorn.Config(app.starlette(), host=host, port=port, log_level="warning", timeout_graceful_shutdown=10)
    server = uvicorn.Server(config)
    try:
        async with beside(server, _announce(server, version)):
            if following is None:
                await server.serve()
                return
            async with beside(server, follow(app, following.source, following.poll_s)):
                await server.serve()
    finally:
        await engine.close()


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


async def _announce(server: uvicorn.Server, version: str) -> None:
    while not server.started:
        await asyncio.sleep(0.02)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    print(f"policy {version} at http://{host}:{port}/v1", flush=True)
