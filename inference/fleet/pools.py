"""A router for each policy version that replicas serve, so that a version's requests reach its replicas only.

A replica whose version changes moves to that version's router, where its cache counts as empty. Routers share what
they learn of the speed of replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from inference.router import Decision, Namespace, Router, RouterConfig
from inference.router.choice import BOUND
from inference.router.fingerprint import Tokens
from inference.router.shared import SharedRouter
from inference.router.subscriber import Subscriptions

UNKNOWN = ""
"""Version of replicas that do not say which they serve."""


@dataclass(frozen=True)
class Pool:
    """Replicas of one version."""

    version: str
    router: Router
    events: Subscriptions
    shared: SharedRouter | None


@dataclass(frozen=True)
class Wanted:
    """A request to route."""

    prompt: Tokens
    max_tokens: int
    session: str | None = None
    group: str | None = None


class Pools:
    """Belongs to one event loop."""

    def __init__(
        self,
        *,
        block_tokens: int = 16,
        events_port: int | None = None,
        redis: str | None = None,
        fleet: str = "default",
    ) -> None:
        """See server.route.Routing. Raises ConfigError without the packages that events and Redis need."""
        self._config = RouterConfig(block_tokens=block_tokens)
        self._events_port, self._redis, self._fleet = events_port, redis, fleet
        self._pools: dict[str, Pool] = {}
        self._of: dict[str, Pool] = {}
        self._began = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool(UNKNOWN)

    def __iter__(self) -> Iterator[Pool]:
        """The pools of the versions that replicas serve, and that of the unknown one."""
        return iter(list(self._pools.values()))

    async def start(self) -> None:
        """Begin to share. Raises ConfigError if Redis refuses the password."""
        self._began = True
        for pool in self._pools.values():
            if pool.shared is not None:
                await pool.shared.start()

    async def close(self) -> None:
        """End what runs. Idempotent."""
        pools, self._pools = list(self._pools.values()), {}
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in pools:
            await _closed(pool)

    def place(self, versions: Mapping[str, str]) -> None:
        """Choose among exactly these replicas from now on. versions: by URL."""
        for version in set(versions.values()):
            self._pool(version)
        for pool in [*self._pools.values()]:
            urls = [url for url, version in versions.items() if version == pool.version]
            pool.router.serve_at(urls)
            pool.events.sync({url: url for url in urls})
            if not urls and pool.version != UNKNOWN:
                del self._pools[pool.version]
                self._spawn(pool, start=False)
        self._of = {url: self._pools[version] for url, version in versions.items()}

    def choose(self, wanted: Wanted, closed: Collection[str], versions: Collection[str] | None) -> Decision | None:
        """The best replica, or None without one; its router is to begin it. Of several pools the least cost wins, and
        no pool gets a prompt that it has not cached if its replicas have more than BOUND times the mean load.

        closed: replicas that may not be chosen. versions: those that will do; None: all.
        """
        found: list[tuple[Decision, float, int]] = []
        for pool in self._pools.values():
            router = pool.router
            open_ = set(router.replicas) - set(closed)
            if (versions is not None and pool.version not in versions) or not open_:
                continue
            with router.hidden(closed):
                decision = router.choose(
                    wanted.prompt, max_tokens=wanted.max_tokens, session=wanted.session, group=wanted.group
                )
            found.append((decision, sum(router.flying().values()) if len(self._pools) > 1 else 0.0, len(open_)))
        if not found:
            return None
        mean = sum(tokens for _, tokens, _ in found) / sum(count for *_, count in found)
        even = [each for each in found if each[0].cached or each[1] / each[2] <= BOUND * mean] or found
        return min(even, key=lambda each: (each[0].cost_s, each[1] / each[2]))[0]

    def of(self, url: str) -> Pool | None:
        """Pool of a replica; None: it is in none."""
        return self._of.get(url)

    def end(self, session: str) -> None:
        """A session comes back no more."""
        for pool in self._pools.values():
            pool.router.end(session)

    def _pool(self, version: str) -> None:
        if version in self._pools:
            return
        router = Router(Namespace(version), self._config)
        for other in self._pools.values():
            router.learn_with(other.router)
        events = Subscriptions(router, self._events_port)
        name = f"{self._fleet}:{version}" if version != UNKNOWN else self._fleet
        shared = None if self._redis is None else SharedRouter(router, self._redis, name)
        if shared is not None:
            events.forward = shared.forward
        self._pools[version] = pool = Pool(version, router, events, shared)
        if self._began:
            self._spawn(pool, start=True)

    def _spawn(self, pool: Pool, *, start: bool) -> None:
        if start and pool.shared is None:
            return
        task = asyncio.create_task(pool.shared.start() if start and pool.shared is not None else _closed(pool))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _closed(pool: Pool) -> None:
    await pool.events.close()
    if pool.shared is not None:
        await pool.shared.close()
