"""A client over several envd servers.

    create, verify -> FleetClient -> the member with the fewest sandboxes -> envd server
                          ^-- lost or draining: left out for a while, another one is asked

In: a list of addresses (`envd.addresses`). Out: sandboxes, each on one server until it ends or is moved. May import
envd's client.
"""

from __future__ import annotations

from envd.addresses import is_list
from envd.client import SandboxClient
from envd.fleet.client import FleetClient

__all__ = ["FleetClient", "open_client"]


def open_client(address: str, backend: str = "") -> SandboxClient:
    """A client of one server, or of a list of servers. Use it as `async with open_client(address) as client`.

    backend: see SandboxClient.
    """
    return FleetClient(address, backend) if is_list(address) else SandboxClient(address, backend=backend)
