from __future__ import annotations

import os
import socket

from envd.sandbox.wire import receive_fds


def test_descriptors_that_came_are_inherited_by_nobody() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        socket.send_fds(there, [b"two"], [there.fileno(), there.fileno()])
        data, found = receive_fds(here, 64, 2)
    inherited = [os.get_inheritable(fd) for fd in found]
    for fd in found:
        os.close(fd)
    assert (data, inherited) == (b"two", [False, False])
