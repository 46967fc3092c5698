"""The port of a sandbox's own loopback that leads to the server's proxy (envd/server/egress.py).

Process 1 listens there in the sandbox's network namespace and sends the server the listening socket: so the sandbox needs no route, no interface
and no right, and the server accepts what is connected inside.
"""

from __future__ import annotations

import socket

PORT = 3128
"""envd/native/spawn.h has it too."""
_WAITING = 32


def offer_listener(channel: socket.socket) -> None:
    """Listen, and send the socket with one byte. In process 1, before it gives up its rights. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", PORT))
        listener.listen(_WAITING)
        socket.send_fds(channel, [b"p"], [listener.fileno()])
