"""Registry of a fleet: which replicas have joined, which drain, and what each router has in flight.

Times that leave a registry are seconds that are left, so that no two clocks are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from contracts.addresses import parse_addresses
from contracts.errors import ConfigError
from inference.errors import FleetError

LEASE_S = 15.0
"""Default lease of a replica, in seconds."""


def check_url(value: str) -> str:
    """The URL of one replica, as the fleet names it. Raises ValueError."""
    try:
        found = parse_addresses(value)
    except ConfigError:
        found = []
    if len(found) != 1 or found[0].is_name or not found[0].scheme or found[0].path:
        raise ValueError(f"{value!r} is not the URL of one replica: write http://host:port")
    return found[0].url


class Joined(BaseModel):
    """A replica with a lease."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """http://host:port, as routers reach it."""
    version: str = Field(default="", max_length=256)
    """Policy version that it serves; empty: it does not say."""
    capacity: int = Field(default=0, ge=0)
    """Sequences that it samples at once; 0: unknown."""
    started: float = Field(allow_inf_nan=False)
    """When its process started, as Unix time: of two processes at one URL the later one counts."""
    lease_s: float = Field(default=LEASE_S, ge=0.5, le=3600)
    """Seconds until the lease ends unless it is renewed."""

    _url = field_validator("url")(check_url)


class Drain(BaseModel):
    """A replica gets no new sessions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    """Unique name of this drain."""
    sessions_s: float = Field(ge=0)
    """Seconds for which the sessions that the replica has may stay."""
    hold_s: float | None = Field(default=None, gt=0)
    """Seconds until the drain ends unless it is renewed; None: it stays."""


class View(BaseModel):
    """What one router sees and does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: Mapping[str, int] = {}
    """Requests in flight at each replica."""
    tokens: Mapping[str, int] = {}
    """Their tokens: prompts and expected outputs."""
    sessions: Mapping[str, int] = {}
    """Open sessions of each replica."""
    pinned: Mapping[str, int] = {}
    """Open sessions pinned to each version."""
    seen: Mapping[str, str] = {}
    """Token of the drain of each replica that this router applies."""
    refused: int = Field(default=0, ge=0)
    """Requests of the last minute that found no replica."""


@dataclass(frozen=True)
class Snapshot:
    """State of a registry."""

    joined: Mapping[str, Joined] = field(default_factory=dict)
    drains: Mapping[str, Drain] = field(default_factory=dict)
    """With the seconds that are left."""
    views: Mapping[str, View] = field(default_factory=dict)
    """Of the other routers, by their names."""


class Registry(Protocol):
    """Leases and drains. Methods raise FleetError if the registry can't be reached."""

    async def start(self) -> None:
        """Connect. Raises ConfigError for wrong credentials."""

    async def join(self, replica: Joined) -> None:
        """Begin or renew a lease. Raises FleetError if a later process has joined under this URL."""

    async def leave(self, url: str, started: float) -> None:
        """End the lease of the process that started then; ignored if another one has it."""

    async def drain(self, url: str, drain: Drain | None, replaces: str | None = None) -> None:
        """Begin, renew or (None) end a drain.

        replaces: token of the only drain that may be replaced or ended: while there is another one, nothing changes.
        None: any.
        """

    async def sync(self, router: str, view: View) -> Snapshot:
        """Publish the view of a router, and return the state."""

    async def close(self) -> None:
        """Disconnect. Idempotent."""


def superseded(url: str) -> FleetError:
    """Error of a process whose URL a later one has."""
    return FleetError(f"{url}: a process that started later has joined under this URL: stop one of them")


class LocalRegistry:
    """Registry of one router, in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._joined: dict[str, tuple[Joined, float]] = {}
        """With the end of the lease."""
        self._drains: dict[str, tuple[Drain, float]] = {}
        """With its beginning."""

    async def start(self) -> None:
        """See Registry.start."""

    async def join(self, replica: Joined) -> None:
        """See Registry.join."""
        before = self._live().get(replica.url)
        if before is not None and before.started > replica.started:
            raise superseded(replica.url)
        self._joined[replica.url] = replica, self._clock() + replica.lease_s

    async def leave(self, url: str, started: float) -> None:
        """See Registry.leave."""
        if url in self._joined and self._joined[url][0].started == started:
            del self._joined[url]

    async def drain(self, url: str, drain: Drain | None, replaces: str | None = None) -> None:
        """See Registry.drain."""
        before = self._held().get(url)
        if replaces is not None and before is not None and before.token != replaces:
            return
        if drain is None:
            self._drains.pop(url, None)
        else:
            self._drains[url] = drain, self._clock()

    async def sync(self, router: str, view: View) -> Snapshot:
        """See Registry.sync."""
        return Snapshot(self._live(), self._held())

    async def close(self) -> None:
        """See Registry.close."""

    def _held(self) -> dict[str, Drain]:
        now = self._clock()
        return {
            url: drain.model_copy(update={"sessions_s": max(0.0, drain.sessions_s - now + began)})
            for url, (drain, began) in self._drains.items()
            if drain.hold_s is None or now < began + drain.hold_s
        }

    def _live(self) -> dict[str, Joined]:
        now = self._clock()
        return {url: each for url, (each, until) in self._joined.items() if now < until}
