"""Run a job with a client of a sandbox server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from envd.client import SandboxClient

T = TypeVar("T")


def with_client(address: str, job: Callable[[SandboxClient], Awaitable[T]]) -> T:
    """Result of the job, whose client is closed afterwards."""

    async def run() -> T:
        async with SandboxClient(address) as client:
            return await job(client)

    return asyncio.run(run())
