"""Programs that start sandboxes for the server: each is a child process, connected by a socket of datagrams."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from envd.errors import BackendUnavailable

_START_S, _STOP_S = 60.0, 15.0
_MAX_HELLO = 64 * 1024


async def start_helper(
    what: str, module: str, *arguments: str, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket, bytes]:
    """Run `python -m module FD arguments`; return its process, the socket to FD and the first datagram.

    what: its name in errors. prefix: the command that runs it. env: variables besides PATH and PYTHONPATH. Raises
    BackendUnavailable with the last line of its standard error if it sends nothing.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with theirs:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
            start_new_session=True,
        )
    ours.setblocking(False)
    hello, errors = b"", b""
    try:
        async with asyncio.timeout(_START_S):
            hello = await asyncio.get_running_loop().sock_recv(ours, _MAX_HELLO)
    except OSError:
        pass  # it took too long, or has ended
    finally:
        if not hello:
            ours.close()
            process.kill()
            errors = (await asyncio.to_thread(process.communicate))[1]
    if not hello:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise BackendUnavailable(f"{what} does not start: {lines[-1] if lines else 'no reason given'}")
    return process, ours, hello


async def send_to_helper(control: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Send a datagram with descriptors, once the socket's queue has room. Raises OSError if the helper has ended."""
    while True:
        try:
            socket.send_fds(control, [data], descriptors)
            return
        except BlockingIOError:
            await asyncio.sleep(0.001)


async def wait_for_helper(process: subprocess.Popen[bytes]) -> None:
    """Wait until a helper whose socket is closed has cleaned up and ended; kill it if that takes too long."""
    try:
        await asyncio.to_thread(process.wait, _STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        await asyncio.to_thread(process.wait)
    if process.stderr is not None:
        process.stderr.close()
