"""Client and key of the current call, so that limits are counted per client."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
from collections import deque
from contextvars import ContextVar
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

T = TypeVar("T")
_CALLER: ContextVar[tuple[str, str]] = ContextVar("caller", default=("", ""))
_KEY: ContextVar[str] = ContextVar("key", default="")
_OURS = 64
"""Prefix length of an IPv6 network in bits: a client can choose the remaining bits itself."""


def answering(context: Any, method: str) -> None:
    """Set the current call of this task, and of tasks that it starts, to a call of `Service/Method`."""
    _CALLER.set((context.peer(), method))


def known_by(key: bytes) -> None:
    """Set the key of the current call, which must have been checked."""
    _KEY.set(hashlib.sha256(key).hexdigest()[:12])


def key() -> str:
    """Name of the current call's key, from which the key can't be derived; empty if the server asks for no key."""
    return _KEY.get()


def source() -> tuple[str, str]:
    """Source that events of the current call are counted by, and its client's address.

    The source is the client's address or, for IPv6, its network. On a Unix socket gRPC can't tell clients apart: the
    source is the method then, and the address is empty. Both are empty outside of a call.
    """
    peer, method = _CALLER.get()
    address = address_of(peer)
    return (_network(address) if address else method), address


def address_of(peer: str) -> str:
    """Address of a gRPC peer (`ipv4:10.0.0.3:50123`) without its port; empty for a Unix socket."""
    kind, _, rest = peer.partition(":")
    return _plain(rest.rpartition(":")[0]) if kind in ("ipv4", "ipv6") else ""


@functools.lru_cache(maxsize=1024)
def _plain(host: str) -> str:
    return unquote(host).strip("[]")


class Turns(Generic[T]):
    """What clients wait for, handed out to each bearer key in turn: one with many waiting delays others by one each."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, item: T) -> None:
        """Queue an item of the current call's key."""
        self._queues.setdefault(key(), deque()).append(item)

    def take(self) -> T:
        """The oldest item of the key whose turn it is."""
        whose = next(iter(self._queues))
        queue = self._queues.pop(whose)
        item = queue.popleft()
        if queue:
            self._queues[whose] = queue  # behind the others
        return item


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((found, _OURS), strict=False))
