"""Play groups of episodes and commit each as soon as it is complete.

    find -> sample -> commit, for all groups at once; a committed group may call for another one

Rollouts, evaluations and the smoke episode are played here; they differ in their `Commits`. Kill it at any instant:
committed groups stay, everything else is sampled again, with the same seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from contracts import tracing
from contracts.episodes import Episode
from inference.rollouts.episode import Player
from inference.rollouts.oversampling import Group, sample_group
from inference.rollouts.progress import Meter, no_progress

ORDER_WAIT_S = 5.0
"""Seconds that a group waits for the one before it to be claimed, since that may be another worker's."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Commits(Protocol[T_co]):
    """How groups are committed, and found again."""

    async def find(self, group: Group) -> T_co | None:
        """The committed group, or None if the caller is to sample it."""

    async def commit(self, group: Group, episodes: list[Episode]) -> T_co:
        """Commit a group's episodes, which are in order of sample."""


class Uncommitted:
    """Commits nothing: the result of a group is its episodes."""

    async def find(self, group: Group) -> list[Episode] | None:
        """See Commits.find."""
        return None

    async def commit(self, group: Group, episodes: list[Episode]) -> list[Episode]:
        """See Commits.commit."""
        return episodes


async def play_groups(
    player: Player,
    groups: Iterable[Group],
    commits: Commits[T],
    meter: Meter | None = None,
    refill: Callable[[T], Group | None] = lambda committed: None,
) -> list[T]:
    """Play and commit every group, and return them in this order, followed by refills. They begin in this order, too.

    refill: a further group to play because of what is in a committed one, or None.

    Raises the first error of any group; the others are called off and what they committed stays.
    """
    meter = meter or Meter(0, no_progress)
    playing: list[asyncio.Task[T]] = []
    claimed: list[asyncio.Event] = []

    async def play(group: Group, before: Sequence[asyncio.Event], own: asyncio.Event) -> T:
        try:
            committed = await commits.find(group)
            if committed is None and before:
                with suppress(TimeoutError):
                    await asyncio.wait_for(before[-1].wait(), ORDER_WAIT_S)
        finally:
            own.set()
        if committed is None:
            with tracing.span("group", {"triplane.group": group.group_id, "triplane.task": group.task.task_id}):
                committed = await commits.commit(group, await sample_group(player, group, meter.episode))
            meter.group()
        else:
            meter.group(found_episodes=group.to_play)
        further = refill(committed)
        if further is not None:
            start(further)
        return committed

    def start(group: Group) -> None:
        meter.expect(1, group.to_play)
        claimed.append(asyncio.Event())
        playing.append(running.create_task(play(group, claimed[-2:-1], claimed[-1])))

    try:
        async with asyncio.TaskGroup() as running:
            for group in groups:
                start(group)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [each.result() for each in playing]
