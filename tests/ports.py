"""Ports for servers that are told their port before they bind it.

The kernel may give a port that it gave for port 0 to the next one who asks, or to an outgoing connection. Those given
here are outside of its range and stay locked until this process ends, so no other test gets them.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_TRIES = 1000
_locked: list[IO[str]] = []


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens at, and that no other call returns while this process lives."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(10_000, 1 << 16) if not low <= port <= high] or range(10_000, 1 << 16)
    folder = Path(tempfile.gettempdir(), f"triplane-test-ports-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for _ in range(_TRIES):
        port = random.SystemRandom().choice(ports)
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind((host, port))
        except OSError:
            lock.close()
            continue
        _locked.append(lock)
        return port
    raise RuntimeError(f"no free port on {host} in {_TRIES} tries")
