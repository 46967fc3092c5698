"""Access of sandboxes to the server's proxy: transfer of the listening socket, and environment variables."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from envd.backends.base import BoxSpec
from envd.errors import SandboxGone
from envd.sandbox.wire import receive_fds

PORT = 3128
"""Port on a sandbox's loopback, where process 1 listens and sends the server the socket. Also in envd/native/spawn.h.
"""
_URL = f"http://127.0.0.1:{PORT}"
_OWN = "localhost,127.0.0.1"
_VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _OWN),
}
_PATIENCE_S = 60.0


def environment_of(spec: BoxSpec) -> Mapping[str, str]:
    """Environment of a sandbox: its own variables, and those of the proxy if it has one."""
    return {**_VARIABLES, **spec.env} if spec.network else spec.env


async def take_listener(channel: socket.socket) -> socket.socket:
    """Receive the listening socket that a sandbox's process 1 sends.

    Raises SandboxGone if the sandbox ends before or sends nothing in time, and OSError.
    """
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: None if ready.done() else ready.set_result(None))
    try:
        async with asyncio.timeout(_PATIENCE_S):  # wait_for of Python 3.11 can swallow a cancellation
            await ready
    except TimeoutError as error:
        raise SandboxGone(f"the sandbox did not open its proxy's port within {_PATIENCE_S:g} s") from error
    finally:
        loop.remove_reader(channel)
    _, fds = receive_fds(channel, 1, 1)
    if not fds:
        raise SandboxGone("the sandbox ended before it opened its proxy's port")
    listener = socket.socket(fileno=fds[0])
    listener.setblocking(False)
    return listener
