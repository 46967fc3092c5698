"""What the backends share whose sandboxes reach the server's proxy: the listening socket's way to the server, and the
variables.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from envd.backends.base import BoxSpec
from envd.errors import SandboxGone
from envd.sandbox.wire import receive_fds

PORT = 3128
"""Of a sandbox's own loopback; process 1 listens there and sends the server that socket. envd/native/spawn.h has it
too.
"""
_URL = f"http://127.0.0.1:{PORT}"
_OWN = "localhost,127.0.0.1"
_VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), _OWN),
}
_PATIENCE_S = 60.0


def environment_of(spec: BoxSpec) -> Mapping[str, str]:
    """The environment of a sandbox: its own, beside where its proxy is if it has one."""
    return {**_VARIABLES, **spec.env} if spec.network else spec.env


async def take_listener(channel: socket.socket) -> socket.socket:
    """The socket that a sandbox's process 1 listens by, once it sends it.

    Raises SandboxGone where it ends without, OSError.
    """
    channel.setblocking(False)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, lambda: None if ready.done() else ready.set_result(None))
    try:
        await asyncio.wait_for(ready, _PATIENCE_S)
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
