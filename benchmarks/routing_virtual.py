"""Routing in virtual time: the replicas of `routing_replicas` and the router run in this process on a simulated clock.

No machine's speed is in the figures, so equal code gives equal ones: for tuning, and for tests.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.routing_load import BLOCK, MOST, Conversation, least
from benchmarks.routing_replicas import Imbalance, Machine, Replica, imbalance, mean_of
from inference.router import Namespace, Router, RouterConfig

_TURN_S = 0.005
"""Seconds between an answer and the next turn."""
_SAMPLE_S = 0.02
"""Seconds between two looks at the load."""


@dataclass(frozen=True)
class Played:
    """What became of a load."""

    computed: float
    """Prompt tokens computed, over those of one cache without end."""
    makespan: float
    """Over the larger of the work of a replica's share and the longest conversation, on replicas of full speed."""
    imbalance: float
    """Tokens in flight of the fullest replica over the mean: mean of samples."""
    imbalance_over_least: float
    """The same over the lower bound: see Imbalance.over_least."""


def play(
    talks: Sequence[Conversation],
    machine: Machine,
    replicas: int,
    slow: int | None = None,
    hashed: Callable[[str], int] | None = None,
) -> Played:
    """Play a load. slow: place of a replica at half speed. hashed: place of a key, in place of the router."""
    loop = _Loop()
    try:
        return loop.run_until_complete(_play(loop, talks, machine, replicas, slow, hashed))
    finally:
        loop.close()


async def _play(
    loop: _Loop,
    talks: Sequence[Conversation],
    machine: Machine,
    count: int,
    slow: int | None,
    hashed: Callable[[str], int] | None,
) -> Played:
    replicas = [Replica(machine.halved() if place == slow else machine) for place in range(count)]
    router = Router(Namespace("policy"), RouterConfig(block_tokens=BLOCK), clock=loop.time)
    for place in range(count):
        router.add(str(place))
    seen: list[Imbalance] = []

    async def talk(each: Conversation) -> None:
        await asyncio.sleep(each.start_s)
        tokens = list[int]()
        names = {"session": each.name, "group": each.key} if each.named else {}
        for place, turn in enumerate(each.turns):
            tokens += turn.tokens
            began = loop.time()
            if hashed is not None:
                made = await replicas[hashed(each.key)].complete(tokens, turn.sampled, each.name, place)
            else:
                decision = router.choose(np.array(tokens, np.int32), max_tokens=MOST, **names)
                router.begin(decision)
                made = await replicas[int(decision.replica)].complete(tokens, turn.sampled, each.name, place)
                router.finish(decision, seconds=loop.time() - began, sampled=turn.sampled)
            tokens = tokens + made
            await asyncio.sleep(_TURN_S)
        router.end(each.name)

    async def watch() -> None:
        while True:
            if found := imbalance(replicas):
                seen.append(found)
            await asyncio.sleep(_SAMPLE_S)

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as tasks:
        for each in talks:
            tasks.create_task(talk(each))
    watching.cancel()
    bound = least(talks, count, machine.prefill, machine.decode, machine.slots)
    computed = sum(each.computed for each in replicas) / bound.computed
    return Played(computed, loop.time() / bound.seconds, *mean_of(seen))


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer as soon as nothing else is to be done."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self._passed = 0.0

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._passed

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._passed += seconds


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for nothing: the time passes at once."""
        self._loop.jump(timeout or 0.0)
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        return found
