"""This machine among those that train one job: the numbers of its ranks, and where all ranks meet.

A launcher of several machines starts `python -m trainer` once on each, with these variables:

    TRIPLANE_NODES, TRIPLANE_NODE_INDEX     number of machines, and which one this is, from 0
    MASTER_ADDR, MASTER_PORT                where rank 0 listens, on machine 0
    TRIPLANE_RENDEZVOUS_S                   longest wait for the start of all machines, in seconds (600)
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainer.errors import RanksLost, TrainingConfigError

NODES, NODE_INDEX, RENDEZVOUS_S = "TRIPLANE_NODES", "TRIPLANE_NODE_INDEX", "TRIPLANE_RENDEZVOUS_S"
_POLL_S, _SIOCGIFADDR = 0.5, 0x8915


@dataclass(frozen=True)
class Node:
    """A machine of a job."""

    index: int
    count: int
    address: str
    """Host name of machine 0."""
    port: int
    wait_s: float

    @property
    def several(self) -> bool:
        """Whether the job has other machines."""
        return self.count > 1


def this_node() -> Node | None:
    """This machine, or None if no launcher of machines started this process. Raises TrainingConfigError."""
    if NODES not in os.environ:
        return None
    try:
        index, count = int(os.environ.get(NODE_INDEX, "0")), int(os.environ[NODES])
        port, wait_s = int(os.environ.get("MASTER_PORT", "29400")), float(os.environ.get(RENDEZVOUS_S, "600"))
    except ValueError as error:
        raise TrainingConfigError(
            f"{NODES}, {NODE_INDEX}, MASTER_PORT or {RENDEZVOUS_S} is not a number ({error}): correct it"
        ) from None
    address = os.environ.get("MASTER_ADDR", "")
    if not 0 <= index < count or (count > 1 and not address):
        raise TrainingConfigError(
            f"{NODE_INDEX}={index}, {NODES}={count}, MASTER_ADDR={address!r} name no machine of a job: set all three"
        )
    return Node(index, count, address, port, wait_s)


def local_ranks(node: Node | None, ranks: int) -> range:
    """Numbers of the ranks on this machine, of a job with `ranks` of them. Raises TrainingConfigError."""
    if node is None:
        return range(ranks)
    if ranks % node.count:
        raise TrainingConfigError(
            f"job field ranks is {ranks}, which {node.count} machines can't share evenly: change {NODES}"
        )
    each = ranks // node.count
    return range(node.index * each, (node.index + 1) * each)


def await_address(node: Node, ranks: int) -> str:
    """Wait until the name of machine 0 resolves. Returns the network interface that leads there.

    Raises RanksLost after `wait_s`.
    """
    until = time.monotonic() + node.wait_s
    while True:
        try:
            return _interface_to(node.address, node.port)
        except OSError as error:
            if time.monotonic() > until:
                words = f"{node.address} can't be resolved after {node.wait_s:g} s: {error}"
                raise RanksLost(local_ranks(node, ranks)[0], ranks, words) from None
        time.sleep(_POLL_S)


def meet_ranks(node: Node, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Wait until the ranks of all machines have started. Returns the store (torch.distributed.Store) through which they
    find each other.

    timeout: longest wait of later operations. Raises RuntimeError after `wait_s`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=node.wait_s)
    store = TCPStore(node.address, node.port, ranks, rank == 0, wait, wait_for_workers=False)
    if store.add("triplane/arrived", 1) == ranks:
        store.set("triplane/all", "1")
    store.wait(["triplane/all"], wait)
    store.set_timeout(timeout)
    return store


def _interface_to(host: str, port: int) -> str:
    """Interface with the address from which this machine reaches `host`; IPv4 only, empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return ""
