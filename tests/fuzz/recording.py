"""Real streams to begin with: what a `GuestLink` and an agent say to each other in sessions that touch every ask,
recorded on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from envd.guest.link import GuestLink
from envd.guest.protocol import HEAD
from envd.native import guest_binary

Session = Callable[[GuestLink], Awaitable[object]]
Frame = tuple[int, int, bytes]
"""Id, kind and fields."""


async def _shells(link: GuestLink) -> None:
    await link.warm_shell()
    await link.shell([("cd /; export A=1; echo hello; false", 10)])
    await link.shell([("echo one", 10), ("echo two >&2; exit 3", 10)], limit=64)
    await link.shell([("head -c 5000 /dev/zero", 10)], limit=512)
    with contextlib.suppress(OSError):
        await link.shell([("sleep 5", 0.05)])
    await link.shell([("exit 7", 10)])


async def _processes(link: GuestLink) -> None:
    number, _ = await link.start(["/bin/cat"], env={"K": "v"}, stdin=True, timeout_s=20)
    await link.stdin(number, b"some input\n")
    await link.output(number, 1, 0, wait_s=5)
    await link.close_stdin(number)
    await link.wait(number, wait_s=5)
    number, _ = await link.start(["sh", "-c", "stty size; sleep 9"], pty=True, directory=".", ring=4096)
    await link.resize(number, 50, 132)
    await link.output(number, 1, 0, wait_s=1)
    await link.signal(number, 15)
    with contextlib.suppress(ProcessLookupError):
        await link.signal(number, 9, tree=True)
    await link.wait(number, wait_s=5)
    await link.processes()
    with contextlib.suppress(OSError):
        await link.start(["/no/such/program"])


async def _files(link: GuestLink) -> None:
    await link.write("a.txt", b"content\n")
    await link.write("deep/er/b", os.urandom(3000), parents=True)
    await link.read("a.txt")
    await link.read_all("deep/er/b", max_bytes=10_000)
    await link.stat("/workspace/deep")
    await link.mkdir("d/e", parents=True)
    await link.move("a.txt", "d/moved")
    await link.list(depth=0)
    await link.list("deep", depth=1, limit=1, skip_hidden=True, files_only=True)
    await link.remove("deep", recursive=True)
    for path in ("missing", "../outside", "d"):
        with contextlib.suppress(OSError):
            await link.read(path)


async def _watches(link: GuestLink) -> None:
    async with contextlib.aclosing(link.watch()) as changes:
        await anext(changes)
        await link.write("seen", b"x")
        await link.mkdir("below")
        await anext(changes)
    asking = asyncio.ensure_future(link.shell([("sleep 5", 20)]))
    await asyncio.sleep(0.05)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await link.init(host_name="again", env={"B": "2", "C": ""}, unix_ns=1_700_000_000 * 10**9)


SESSIONS: tuple[Session, ...] = (_shells, _processes, _files, _watches)


def record(session: Session) -> tuple[bytes, bytes]:
    """Play a session with the built agent. Returns what the server sent, and what the agent did."""
    with tempfile.TemporaryDirectory() as directory:
        workspace = Path(directory, "workspace")
        workspace.mkdir()
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        where = ["--workspace", str(workspace), "--scratch", str(Path(directory, "scratch"))]
        command = [str(guest_binary()), "--fd", str(theirs.fileno()), *where]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        said = bytearray(), bytearray()
        copies = [
            threading.Thread(target=_copy, args=(source, target, into))
            for source, target, into in ((near, far, said[0]), (far, near, said[1]))
        ]
        for each in copies:
            each.start()
        asyncio.run(_play(ours, session))
        for each in copies:
            each.join()
        near.close()
        far.close()
        process.wait(20)
        return bytes(said[0]), bytes(said[1])


def _copy(source: socket.socket, target: socket.socket, into: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            into += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


async def _play(ours: socket.socket, session: Session) -> None:
    link = await GuestLink.over_socket(ours)
    try:
        async with asyncio.timeout(60):
            await link.init(host_name="box", env={"GREETING": "hello"})
            await session(link)
    finally:
        link.close()
        await link.closed()


def frames_of(stream: bytes) -> Iterator[Frame]:
    """A recorded stream, taken apart; what is cut at its end is left out."""
    at = 0
    while at + HEAD.size <= len(stream):
        size, identity, kind = HEAD.unpack_from(stream, at)
        yield identity, kind, stream[at + HEAD.size : at + 4 + size]
        at += 4 + size
