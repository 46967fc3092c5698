"""Starts an agent on a workspace of its own, as an ordinary process, and gives the link to it; and looks at what it
started.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from envd.guest.link import GuestLink
from envd.native import guest_binary

T = TypeVar("T")


def command(fd: int, directory: Path, program: Path | None = None) -> list[str]:
    """program: the built agent when None."""
    where = ["--workspace", str(directory / "workspace"), "--scratch", str(directory / "scratch")]
    return [str(program or guest_binary()), "--fd", str(fd), *where]


class Guest:
    """One running agent."""

    def __init__(self, directory: Path, program: Path | None = None, **environment: str) -> None:
        self.workspace = directory / "workspace"
        self.workspace.mkdir(parents=True)
        self.socket, theirs = socket.socketpair()
        folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if os.access(folder, os.X_OK)]
        environment |= {"PATH": os.pathsep.join(folders), "HOME": str(directory), "LANG": "C.UTF-8"}
        with theirs:
            self.process = subprocess.Popen(
                command(theirs.fileno(), directory, program), pass_fds=[theirs.fileno()], env=environment
            )

    def run(self, job: Callable[[GuestLink], Awaitable[T]], *, patience_s: float = 30.0, init: bool = True) -> T:
        async def whole() -> T:
            link = await GuestLink.over_socket(self.socket, patience_s=patience_s)
            try:
                if init:
                    await link.init(host_name="box", env={"GREETING": "hello"})
                async with asyncio.timeout(60):
                    return await job(link)
            finally:
                link.close()
                await link.closed()

        return asyncio.run(whole())

    def stop(self) -> None:
        self.socket.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()


async def sh(link: GuestLink, command: str, deadline_s: float = 20, limit: int = 16384) -> tuple[int, str]:
    (result,) = await link.shell([(command, deadline_s)], limit=limit)
    return result.code, (result.head + result.tail).decode()


def alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"sleep\0{mark}\0" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def until_alive(mark: str, count: int) -> bool:
    """Whether so many run, soon: what was forked has yet to exec."""
    for _ in range(500):
        if len(alive(mark)) == count:
            return True
        await asyncio.sleep(0.01)
    return False
