"""A port that a test is given is its own."""

from __future__ import annotations

import socket
from pathlib import Path

from tests import ports


def test_ports_are_given_once_and_never_those_that_the_kernel_gives() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    given = [ports.free_port() for _ in range(200)]
    assert len(set(given)) == len(given)
    assert low <= 10_000 or not any(low <= port <= high for port in given)
    with socket.create_server(("127.0.0.1", given[0])):
        pass
