"""Keep a replica in a fleet: renew its lease while it is well, and end it at the end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from contracts.addresses import is_http_url
from contracts.errors import ConfigError
from inference.errors import FleetError
from inference.fleet.client import FleetClient, read_key
from inference.fleet.probe import probe
from inference.fleet.registry import LEASE_S, Joined, check_url

_LEAVE_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Joining:
    """Which fleet a replica joins, and how."""

    routers: Sequence[str]
    """URLs of routers; of those that share a registry, one is enough."""
    url: str
    """URL at which the routers reach the replica."""
    capacity: int = 0
    """Sequences that it samples at once; 0: unknown."""
    lease_s: float = LEASE_S
    """Seconds without a renewal after which it leaves the choice."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a URL that no other process can use."""
        try:
            host = httpx.URL(check_url(self.url)).host
        except ValueError as error:
            raise ConfigError(f"the address of the replica: {error}") from None
        wrong = next((each for each in self.routers if not is_http_url(each)), None)
        if wrong is not None:
            raise ConfigError(f"{wrong!r} is not the URL of a router: write http://HOST:PORT")
        if host in ("0.0.0.0", "::"):
            raise ConfigError(f"{self.url} is no address that routers can reach: give --advertise http://HOST:PORT")


@asynccontextmanager
async def joined(joining: Joining) -> AsyncIterator[None]:
    """Keep the lease meanwhile. A replica that is not well is not renewed, so that its lease lapses."""
    key, started = read_key(), time.time()
    clients = [FleetClient(each, key) for each in joining.routers]
    task = asyncio.gather(*(_kept(each, joining, started) for each in clients))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.gather(*(_left(each, joining.url, started) for each in clients))


async def _kept(client: FleetClient, joining: Joining, started: float) -> None:
    said = ""
    async with httpx.AsyncClient(trust_env=False) as http:
        while True:
            found = await probe(http, joining.url)
            fault = found.fault
            if fault is None:
                replica = Joined(
                    url=joining.url,
                    version=found.version or "",
                    capacity=joining.capacity,
                    started=started,
                    lease_s=joining.lease_s,
                )
                try:
                    await client.join(replica)
                except FleetError as error:
                    fault = str(error)
            if fault is not None and fault != said:
                _log.warning("%s does not renew its lease at %s: %s", joining.url, client.router, fault)
            said = fault or ""
            await asyncio.sleep(joining.lease_s / 3)


async def _left(client: FleetClient, url: str, started: float) -> None:
    try:
        async with asyncio.timeout(_LEAVE_S):
            await client.leave(url, started)
    except (FleetError, TimeoutError) as error:
        _log.warning("%s could not leave %s, its lease lapses: %s", url, client.router, error)
    finally:
        await client.close()


def stay(joining: Joining) -> None:
    """Keep the lease until SIGTERM or SIGINT."""
    asyncio.run(_stay(joining))


async def _stay(joining: Joining) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with joined(joining):
        print(f"{joining.url} joins {', '.join(joining.routers)}", flush=True)
        await ended.wait()
