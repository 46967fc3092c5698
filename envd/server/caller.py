"""Where the call came from that is being answered, so that what one client does is not counted against another's."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

_CALLER: ContextVar[tuple[str, str]] = ContextVar("caller", default=("", ""))
_KEY: ContextVar[str] = ContextVar("key", default="")
_OURS = 64
"""Bits of an IPv6 address that a network has: its clients choose the others as they like."""


def answering(context: Any, method: str) -> None:
    """From now on this task, and what it starts, answers a call of `Service/Method`."""
    _CALLER.set((context.peer(), method))


def known_by(key: bytes) -> None:
    """The call that is being answered came with this key, which was checked."""
    _KEY.set(hashlib.sha256(key).hexdigest()[:12])


def key() -> str:
    """A name of the key that the call came with, which tells nothing of it; empty where none is asked for."""
    return _KEY.get()


def source() -> tuple[str, str]:
    """What events of the call are counted by, and its client's address.

    By the client's address or, for IPv6, its network. On a Unix socket all clients look the same to gRPC: by the method
    there, with an empty address. Both are empty where no call is being answered.
    """
    peer, method = _CALLER.get()
    address = address_of(peer)
    return (_network(address) if address else method), address


def address_of(peer: str) -> str:
    """The address in what gRPC says of a peer (`ipv4:10.0.0.3:50123`), without its port; empty for a Unix socket."""
    kind, _, rest = peer.partition(":")
    return _plain(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else ""


@functools.lru_cache(maxsize=1024)
def _plain(host: str) -> str:
    return unquote(host).strip("[]")


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, _OURS), strict=False))
