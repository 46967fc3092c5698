"""Lists of envd servers: those of `contracts.addresses`, and `unix:/path`, with commas between them."""

from __future__ import annotations

import asyncio

from contracts.addresses import DNS, parse_addresses, resolve
from contracts.errors import ConfigError, NameUnresolved
from envd.errors import EnvdError

_UNIX = "unix:"
_RESOLVE_S = 10.0
"""Longest wait for the answer of the name service."""


def is_list(address: str) -> bool:
    """Whether an address may stand for several servers."""
    return "," in address or address.startswith(DNS)


def entries_of(address: str) -> tuple[str, ...]:
    """Entries of a list, each once. Raises EnvdError for an entry that is no address."""
    entries = tuple(dict.fromkeys(each.strip() for each in address.split(",")))
    try:
        for each in entries:
            if not each.startswith(_UNIX):
                parse_addresses(each)
    except ConfigError as error:
        raise EnvdError(f"the list of envd servers {address!r}: {error}, or unix:/path") from None
    return entries


async def servers_of(entries: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """Addresses that the entries stand for now, and one line for each name that can't be resolved."""
    found: set[str] = set()
    faults: list[str] = []
    for each in entries:
        if not each.startswith(DNS):
            found.add(each)
            continue
        try:
            servers = await asyncio.to_thread(resolve, parse_addresses(each), timeout_s=_RESOLVE_S)
        except NameUnresolved as error:
            faults.append(str(error))
        else:
            found |= {server.target for server in servers}
    return found, faults
