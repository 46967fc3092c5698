"""An agent as a plain process on a directory, and a link to it: what a sandbox is to the server, without its walls."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from envd.guest.link import GuestLink
from tests.envd.guests import command

T = TypeVar("T")


@asynccontextmanager
async def agent(workspace: Path) -> AsyncIterator[GuestLink]:
    """A link to an agent that serves `workspace`; it ends with the block."""
    ours, theirs = socket.socketpair()
    with theirs:
        program = command(theirs.fileno(), workspace.parent)
        process = subprocess.Popen(program, pass_fds=[theirs.fileno()], start_new_session=True)
    link = await GuestLink.over_socket(ours)
    try:
        await link.init(host_name="test", env={})
        yield link
    finally:
        link.close()
        await link.closed()
        await asyncio.to_thread(process.wait, 20)


def with_agent(workspace: Path, job: Callable[[GuestLink], Awaitable[T]]) -> T:
    """Run a coroutine with an agent."""

    async def run() -> T:
        async with agent(workspace) as link:
            return await job(link)

    return asyncio.run(run())
