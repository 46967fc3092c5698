"""Fleet: which replicas there are, and which of them a request may be sent to.

registry (leases, drains) every SYNC_S --+
addresses, resolved, every WATCH_S ------+--> replicas --probes every WATCH_S, faults of requests--> pools --> choose
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from contracts.addresses import Address, resolve
from contracts.errors import InfraFault
from inference.engines.marks import UNPROVEN
from inference.errors import FleetError
from inference.fleet import events
from inference.fleet.events import Event, Kind
from inference.fleet.health import Health, ejected
from inference.fleet.pools import UNKNOWN, Pools, Wanted
from inference.fleet.probe import Found, probe
from inference.fleet.registry import Drain, Joined, Registry, Snapshot, View
from inference.router import Decision

SYNC_S = 0.5
"""Seconds between two looks at the registry."""
WATCH_S = 2.0
"""Seconds between two probes of a replica, and lookups of names."""
IDLE_S = 600.0
"""Seconds without a request after which a session counts as ended."""
SESSIONS = 100_000
"""Open sessions that are known at most."""
REFUSED_S = 60.0
"""Seconds for which a request that found no replica counts as demand."""
_log = logging.getLogger(__name__)


@dataclass
class Replica:
    """One replica, as this router knows it."""

    url: str
    health: Health
    joined: Joined | None = None
    """Its lease; None: its address is given."""
    version: str | None = None
    """Policy version that it said last; None: it says none."""
    drain: Drain | None = None
    sessions_until: float = 0.0
    """When its sessions must leave, while it drains."""
    requests: int = 0
    """In flight, from this router."""
    tokens: int = 0
    """Of these: prompts and expected outputs."""


@dataclass
class _Session:
    url: str
    version: str | None
    """Version that it is pinned to, or None."""
    group: str | None
    used: float


@dataclass(eq=False)
class Sent:
    """A request in flight at a replica."""

    decision: Decision
    replica: Replica
    tokens: int
    over: bool = field(default=False)


class Fleet:
    """Belongs to one event loop."""

    def __init__(
        self,
        addresses: Sequence[Address],
        registry: Registry,
        pools: Pools,
        client: httpx.AsyncClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """addresses: of replicas that need no lease, names included. clock: seconds."""
        self._addresses, self.registry, self.pools = addresses, registry, pools
        self._client, self._clock = client, clock
        self.name = uuid.uuid4().hex
        """This router's name in the registry."""
        self.replicas: dict[str, Replica] = {}
        self._resolved: dict[Address, list[str]] = {}
        """URLs of each address when it was last resolved; while it can't be, without those that went away since."""
        self._unresolved: set[Address] = set()
        self._ejected: set[str] = set()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._refused: deque[float] = deque()
        self._snapshot = Snapshot()
        self._syncing = asyncio.Lock()
        self._away = False
        self.tell: Callable[[Event], None] = events.log
        """Called with each change."""

    @property
    def serving(self) -> list[str]:
        """URLs of the replicas that are well."""
        return [url for url, each in self.replicas.items() if each.health.fault is None]

    @property
    def faults(self) -> dict[str, str]:
        """Those that are not, with the fault."""
        return {url: each.health.fault for url, each in self.replicas.items() if each.health.fault is not None}

    @property
    def _given(self) -> list[str]:
        return [url for urls in self._resolved.values() for url in urls]

    @property
    def versions(self) -> list[str]:
        """Policy versions that can be asked for."""
        return [pool.version for pool in self.pools if pool.router.replicas and pool.version != UNKNOWN]

    async def start(self) -> None:
        """Connect, and probe every replica once. Raises ConfigError."""
        await self.registry.start()
        await self.pools.start()
        await self.sync()
        await self.check()

    async def watch(self) -> None:
        """Follow registry and replicas until cancelled; a replica that hangs does not delay the registry."""

        async def repeat(look: Callable[[], Awaitable[None]], pause_s: float) -> None:
            while True:
                await asyncio.sleep(pause_s)
                await look()

        await asyncio.gather(repeat(self.sync, SYNC_S), repeat(self.check, WATCH_S))

    async def close(self) -> None:
        """Disconnect."""
        await self.pools.close()
        await self.registry.close()

    async def sync(self) -> None:
        """Look at the registry. While it can't be reached, everything stays as it was last seen, leases included."""
        async with self._syncing:  # else one that has waited for a probe would undo what a later one has seen
            await self._sync()

    async def _sync(self) -> None:
        try:
            found = await self.registry.sync(self.name, self.view())
        except FleetError as error:
            if not self._away:
                _log.warning("%s; leases and drains stay as they were; said once", error)
            self._away = True
            return
        if self._away:
            _log.warning("the registry answers again")
        self._away, self._snapshot = False, found
        await self._probe([each for url, each in self.replicas.items() if each.drain and url not in found.drains])
        new = []
        for url, joined in found.joined.items():
            if url not in self.replicas:
                self._tell("joined", url, f"version {joined.version or 'unknown'}")
                new.append(self._known(url))
            before, self.replicas[url].joined = self.replicas[url].joined, joined
            if before is not None and before.started != joined.started:
                self._tell("joined", url, "its process was started again")
                self.replicas[url].health = Health(self._clock)
                new.append(self.replicas[url])
        for url, replica in self.replicas.items():
            replica.joined = found.joined.get(url)
            self._drained(replica, found.drains.get(url))
        self._settle()
        if new:
            await self._probe(new)

    async def check(self) -> None:
        """Resolve addresses, and probe all replicas once."""
        for address in self._addresses:
            try:
                self._resolved[address] = [each.url for each in await asyncio.to_thread(resolve, [address])]
                self._unresolved.discard(address)
            except InfraFault as error:
                if address not in self._unresolved:
                    _log.warning("%s; its servers stay while they accept connections; said once", error)
                self._unresolved.add(address)
        for url in self._given:
            self._known(url)
        self._settle()
        await self._probe([*self.replicas.values()])

    def choose(
        self, wanted: Wanted, *, pin: str | None = None, version: str | None = None, tried: Collection[str] = ()
    ) -> Sent | None:
        """Choose a replica and begin; None if there is none.

        pin: version that all tokens must have. version: that of the replica, unless it does not say. tried: replicas
        that failed at this request. A replica that drains is chosen only for a session that it has, and, if no other
        one is left of its version, for open sessions that are pinned to it, with their groups.
        """
        now = self._clock()
        session = self._sessions.get(wanted.session) if wanted.session is not None else None
        closed = {url for url, each in self.replicas.items() if each.drain is not None} | set(tried)
        versions = {pin} if pin is not None else None if version is None else {version, UNKNOWN}
        if session is not None and session.url not in tried and self._stays(session, versions, now):
            closed = set(self.replicas) - {session.url}
        decision = self.pools.choose(wanted, closed, versions)
        if decision is None and pin is not None and self._is_open(wanted, pin):
            full = {
                url
                for url, each in self.replicas.items()
                if url in tried or (each.drain is not None and now >= each.sessions_until)
            }
            decision = self.pools.choose(wanted, full, versions)
        if decision is None:
            if not tried and (versions is None or not self.serving):  # another replica would lack the version, too
                self._refused.append(now)
            return None
        pool = self.pools.of(decision.replica)
        assert pool is not None, "just chosen"
        pool.router.begin(decision)
        sent = Sent(decision, self.replicas[decision.replica], decision.prompt + decision.output)
        sent.replica.requests += 1
        sent.replica.tokens += sent.tokens
        if wanted.session is not None:
            self._sessions[wanted.session] = _Session(decision.replica, pin, wanted.group, now)
            self._sessions.move_to_end(wanted.session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return sent

    def finish(self, sent: Sent, *, seconds: float | None = None, sampled: int = 0) -> None:
        """A request is over. See Router.finish. Idempotent."""
        if sent.over:
            return
        sent.over = True
        sent.replica.requests -= 1
        sent.replica.tokens -= sent.tokens
        if seconds is not None:
            sent.replica.health.answered()
        pool = self.pools.of(sent.replica.url)
        if pool is not None:
            pool.router.finish(sent.decision, seconds=seconds, sampled=sampled)

    def end(self, session: str) -> None:
        """A session comes back no more. Unknown ones are ignored."""
        self._sessions.pop(session, None)
        self.pools.end(session)

    def failed(self, url: str, fault: str, *, away: bool = False) -> None:
        """A request failed at a replica. away: nobody accepted the connection."""
        if url in self.replicas:
            self._failed(self.replicas[url], fault, away=away, request=True)
            self._settle()

    async def refresh(self, url: str) -> None:
        """Probe a replica now, whose version seems to be another one."""
        if url in self.replicas:
            await self._probe([self.replicas[url]])

    def view(self) -> View:
        """What this router does."""
        now = self._clock()
        while self._refused and self._refused[0] < now - REFUSED_S:
            self._refused.popleft()
        while self._sessions and next(iter(self._sessions.values())).used <= now - IDLE_S:
            self.end(next(iter(self._sessions)))
        busy = {url: each for url, each in self.replicas.items() if each.requests}
        return View(
            requests={url: each.requests for url, each in busy.items()},
            tokens={url: each.tokens for url, each in busy.items()},
            sessions=Counter(each.url for each in self._sessions.values()),
            pinned=Counter(each.version for each in self._sessions.values() if each.version is not None),
            seen={url: each.drain.token for url, each in self.replicas.items() if each.drain is not None},
            refused=len(self._refused),
        )

    def views(self) -> list[View]:
        """What all routers do: this one now, the others as of their last look at the registry."""
        return [self.view(), *self._snapshot.views.values()]

    def state(self) -> dict[str, Any]:
        """The fleet as JSON: GET /fleet."""
        views = self.views()
        pins = sorted({*self.versions, *(version for view in views for version in view.pinned)})
        return {
            "replicas": [self._row(each, views) for each in self.replicas.values()],
            "pinned": {version: sum(view.pinned.get(version, 0) for view in views) for version in pins},
            "routers": len(views),
            "registry": "away" if self._away else "well",
        }

    def _row(self, replica: Replica, views: Sequence[View]) -> dict[str, Any]:
        url, drain = replica.url, replica.drain
        left = math.inf if replica.joined is None else replica.joined.lease_s
        return {
            "url": url,
            "state": self._state(replica),
            "version": replica.version,
            "capacity": replica.joined.capacity if replica.joined is not None else 0,
            "started": replica.joined.started if replica.joined is not None else None,
            "lease_s": None if math.isinf(left) else left,
            "requests": sum(view.requests.get(url, 0) for view in views),
            "tokens": sum(view.tokens.get(url, 0) for view in views),
            "sessions": sum(view.sessions.get(url, 0) for view in views),
            "drain": None if drain is None else drain.token,
            "drain_seen": drain is not None and all(view.seen.get(url) == drain.token for view in views),
            "sessions_s": max(0.0, replica.sessions_until - self._clock()) if drain is not None else None,
            "fault": replica.health.fault,
        }

    def _state(self, replica: Replica) -> str:
        if replica.health.away:
            return "away"
        if replica.url in self._ejected:
            return "ejected"
        if replica.drain is not None:
            return "draining"
        if (replica.version or "").startswith(UNPROVEN):
            return "updating"
        return "serving" if replica.health.fault is None else "faulty"

    def _known(self, url: str) -> Replica:
        return self.replicas.setdefault(url, Replica(url, Health(self._clock)))

    def _stays(self, session: _Session, versions: Collection[str] | None, now: float) -> bool:
        """Whether a session stays at a replica that drains."""
        replica = self.replicas.get(session.url)
        pool = self.pools.of(session.url)
        if replica is None or replica.drain is None or pool is None or now >= replica.sessions_until:
            return False
        return versions is None or pool.version in versions

    def _is_open(self, wanted: Wanted, pin: str) -> bool:
        """Whether a session, or one of its group, is open and pinned to a version."""
        return any(
            each.version == pin and (name == wanted.session or (each.group is not None and each.group == wanted.group))
            for name, each in self._sessions.items()
        )

    def _drained(self, replica: Replica, drain: Drain | None) -> None:
        """Apply a drain, or its end (None)."""
        before, replica.drain = replica.drain, drain
        if drain is None:
            if before is not None:
                self._tell("undrained", replica.url)
            return
        replica.sessions_until = self._clock() + drain.sessions_s
        if before is None:
            self._tell("draining", replica.url, f"its sessions may stay for {drain.sessions_s:.0f} s")

    async def _probe(self, replicas: Sequence[Replica]) -> None:
        for replica, found in zip(
            replicas, await asyncio.gather(*(probe(self._client, each.url) for each in replicas)), strict=True
        ):
            self._probed(replica, found)
        self._settle()

    def _probed(self, replica: Replica, found: Found) -> None:
        if found.fault is not None:
            self._failed(replica, found.fault, away=found.away, request=False)
            return
        version = found.version
        if version is None and replica.joined is not None:
            version = replica.joined.version or None
        if version != replica.version:
            self._tell("version", replica.url, f"{replica.version or 'unknown'} -> {version or 'unknown'}")
            replica.version = version
        if replica.health.well():
            self._tell("well", replica.url)

    def _failed(self, replica: Replica, fault: str, *, away: bool, request: bool) -> None:
        if replica.health.failed(fault, away=away, request=request):
            self._tell("away" if away else "faulty", replica.url, fault)

    def _settle(self) -> None:
        """Let the pools choose among the replicas that may be asked."""
        for address in self._unresolved:  # the IP address of a pod that is gone may soon be that of another server
            known = self._resolved.get(address, [])
            self._resolved[address] = [url for url in known if not self.replicas[url].health.away]
        for url in set(self.replicas) - set(self._given):
            if self.replicas[url].joined is None:
                self._tell("left", url, "its lease has ended, or its address is gone")
                del self.replicas[url]
        present = {url: each for url, each in self.replicas.items() if not each.health.away}
        out = ejected((url, each.health) for url, each in present.items())
        for url in out - self._ejected:
            self._tell("ejected", url, present[url].health.fault or "")
        self._ejected = out
        asked = {url: each.version or UNKNOWN for url, each in present.items() if url not in out}
        self.pools.place({url: version for url, version in asked.items() if not version.startswith(UNPROVEN)})

    def _tell(self, kind: Kind, url: str, reason: str = "") -> None:
        self.tell(Event(kind, url, reason))
