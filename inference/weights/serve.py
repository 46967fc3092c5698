"""Run the weights service until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import uvicorn

from contracts.artifacts import ArtifactRef
from contracts.http_connections import BoundedConnection
from contracts.processes import allow_open_files
from contracts.rpc.connecting import read_keys
from contracts.store import open_store
from inference.server.listening import announced, beside, own_hosts_only, split_address
from inference.server.policies import find_checkpoint
from inference.weights.folder import WeightsFolder
from inference.weights.service import Service


def serve(
    listen: str, folder: Path, *, store: str | None, keep: int, key_file: Path | None, first: str | None, plain: bool
) -> None:
    """Serve until interrupted. Prints the address once it is ready.

    first: digest prefix of the checkpoint to pull before. plain: the first one as float32 weights.
    """
    host, port = split_address(listen)
    keys = read_keys(key_file) if key_file else ()
    weights = WeightsFolder(folder, keep)
    os.environ["TRIPLANE_CACHE"] = str(weights.cache)
    opened = open_store(store)
    try:
        if first is not None:
            ref: ArtifactRef = find_checkpoint(first, opened, "--first")
            weights.start_with(weights.pull(opened, ref, plain=plain))
        app = own_hosts_only(Service(weights, opened, keys).starlette(), host)
        config = uvicorn.Config(
            app, host=host, port=port, http=BoundedConnection, log_level="warning", timeout_graceful_shutdown=5
        )
        asyncio.run(_serve(uvicorn.Server(config), weights.folder))
    finally:
        weights.close()


async def _serve(server: uvicorn.Server, folder: Path) -> None:
    async def announce() -> None:
        print(f"weights of {folder} at {(await announced(server)).url}", flush=True)

    allow_open_files()
    async with beside(server, announce()):
        await server.serve()
