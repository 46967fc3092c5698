"""Lists of envd servers: `unix:/path`, `host:port`, or `dns:NAME:PORT` for every address behind a name, with commas
between them.
"""

from __future__ import annotations

import asyncio
import socket

from envd.errors import EnvdError

_DNS = "dns:"
_RESOLVE_S = 10.0
"""Longest wait for the answer of the name service."""


def is_list(address: str) -> bool:
    """Whether an address may stand for several servers."""
    return "," in address or address.startswith(_DNS)


def entries_of(address: str) -> tuple[str, ...]:
    """Entries of a list, each once. Raises EnvdError for an empty entry or a name without a port."""
    entries = tuple(dict.fromkeys(each.strip() for each in address.split(",")))
    for each in entries:
        name, _, port = each.removeprefix(_DNS).rpartition(":")
        if not each or (each.startswith(_DNS) and not (name and port.isdecimal() and 0 < int(port) < 65536)):
            raise EnvdError(
                f"{each!r} in the list of envd servers {address!r} is not an address: write unix:/path, host:port or"
                " dns:NAME:PORT"
            )
    return entries


async def servers_of(entries: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """Addresses that the entries stand for now, and one line for each name that can't be resolved."""
    found: set[str] = set()
    faults: list[str] = []
    for each in entries:
        if not each.startswith(_DNS):
            found.add(each)
            continue
        name, _, port = each.removeprefix(_DNS).rpartition(":")
        try:
            found |= await asyncio.wait_for(_resolved(name.strip("[]"), int(port)), _RESOLVE_S)
        except (OSError, TimeoutError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else "no answer in time"
            faults.append(f"{each}: {said}")
    return found, faults


async def _resolved(name: str, port: int) -> set[str]:
    answers = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {(family, str(where[0])) for family, _, _, _, where in answers}
    return {f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}" for family, host in hosts}
