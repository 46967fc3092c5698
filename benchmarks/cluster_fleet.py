"""Sandboxes over simulated envd servers, chosen by the real client of a list of servers (`envd.fleet`).

    many clients (a step pod each) -> FleetClient's choice -> the server with the fewest sandboxes of that client

No client knows what the others put where. Then one server is lost, and its sandboxes are created again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from envd.errors import ServerLost
from envd.fleet.client import FleetClient
from envd.fleet.member import Member

SEED = 20
CHURN = 2
"""How often every sandbox ends and another one starts before loads are read."""


@dataclass(frozen=True)
class Spread:
    """Sandboxes of each server in a simulation."""

    mean: float
    most: int
    """On the fullest server."""
    lost: int
    """Sandboxes of the lost server, whose episodes are played again."""
    most_after: int
    """On the fullest server when they have started again."""
    connections: int
    """Client connections of each server."""


class _Server(Member):
    """A server that creates a sandbox at once, or is lost."""

    def __init__(self, address: str, sandboxes: Counter[str], lost: set[str]) -> None:
        super().__init__(address, lambda member: None)
        self._all, self._lost, self._started = sandboxes, lost, 0

    async def serves(self) -> bool:
        """See Member.serves."""
        if self.address in self._lost:
            self.leave_out("it does not answer")
            return False
        return True

    def start(self) -> str:
        """Create a sandbox. Raises ServerLost."""
        if self.address in self._lost:
            self.leave_out("connection lost")
            raise ServerLost(f"lost the envd server {self.address}")
        self._started += 1
        name = f"{self.address}/{self._started}"
        self._open_ids.add(name)
        self._all[self.address] += 1
        return name

    def end(self, name: str) -> None:
        """Delete a sandbox."""
        self._open_ids.discard(name)
        self._all[self.address] -= 1

    def forget(self) -> list[str]:
        """Sandboxes that were on it when it was lost."""
        names = list(self._open_ids)
        self._open_ids.clear()
        return names


class _Client(FleetClient):
    """A fleet of simulated servers, which no name service lists."""

    def __init__(self, servers: int, sandboxes: Counter[str], lost: set[str]) -> None:
        super().__init__(",".join(f"10.0.{number // 256}.{number % 256}:7400" for number in range(servers)))
        for address in self._entries:
            self._members[address] = _Server(address, sandboxes, lost)
        self._refreshed = float("inf")
        self.open: list[tuple[_Server, str]] = []

    async def _refresh(self) -> None:
        """See FleetClient._refresh."""

    async def start(self) -> None:
        """Create a sandbox where the real client would."""

        async def create(member: Member) -> tuple[_Server, str]:
            assert isinstance(member, _Server)
            return member, member.start()

        self.open.append(await self._somewhere(create))

    async def replace_one(self) -> None:
        """End a random sandbox, and start another one."""
        number = random.randrange(len(self.open))
        self.open[number], self.open[-1] = self.open[-1], self.open[number]
        server, name = self.open.pop()
        server.end(name)
        await self.start()

    async def replace_lost(self, address: str) -> None:
        """Start again what was on a lost server."""
        gone = set(self._member(address).forget())
        self.open = [each for each in self.open if each[1] not in gone]
        for _ in gone:
            await self.start()

    def _member(self, address: str) -> _Server:
        member = self._members[address]
        assert isinstance(member, _Server)
        return member


def simulate(sandboxes: int, clients: int, servers: int, seed: int = SEED) -> Spread:
    """Sandboxes of `clients` clients, in equal parts, over servers of which one is lost at the end."""
    random.seed(seed)
    log = logging.getLogger("envd.fleet.member")
    before, log.disabled = log.disabled, True
    try:
        return asyncio.run(_simulate(sandboxes, clients, servers))
    finally:
        log.disabled = before


async def _simulate(sandboxes: int, clients: int, servers: int) -> Spread:
    loads: Counter[str] = Counter()
    lost: set[str] = set()
    all_clients = [_Client(servers, loads, lost) for _ in range(clients)]
    for number in range(sandboxes):
        await all_clients[number % clients].start()
    busy = [each for each in all_clients if each.open]
    for _ in range(CHURN * sandboxes):
        await random.choice(busy).replace_one()
    most = max(loads.values())
    victim = max(loads, key=lambda address: loads[address])
    gone = loads.pop(victim)
    lost.add(victim)
    for each in busy:
        await each.replace_lost(victim)
    return Spread(sandboxes / servers, most, gone, _most(loads), len(busy))


def _most(loads: Mapping[str, int]) -> int:
    return max(loads.values(), default=0)
