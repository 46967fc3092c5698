"""Sample one group with over-sampling: start more episodes than are kept, and choose the kept ones (`select`).

The others are stragglers, DROPPED or ABORTED; each leaves a row with its tokens. `straggler_bias` estimates what the
choice does to the solve rate.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.episodes import Episode, Outcome, Slot
from contracts.tasks import Task
from inference.rollouts.config import Profile
from inference.rollouts.episode import Attempt, Player, play_episode


@dataclass(frozen=True)
class Group:
    """The episodes of one task, which are played and committed together."""

    group_id: str
    task: Task
    slots: Sequence[Slot]
    """Of the episodes that are started, in order of sample from 0."""
    keep: int
    """Number of episodes to keep; `slots` beyond it are over-sampling."""


async def sample_group(player: Player, group: Group, played: Callable[[Episode], None]) -> list[Episode]:
    """All episodes that were started, in order of sample; those not kept are DROPPED or ABORTED. played: called at the
    end of each.
    """
    profile = player.config.profile
    attempts: dict[int, Attempt] = {}

    async def play(slot: Slot) -> Episode:
        episode = await play_episode(
            player, group.task, slot, group.group_id, begun=lambda attempt: attempts.__setitem__(slot.sample, attempt)
        )
        played(episode)
        return episode

    started = [asyncio.create_task(play(slot)) for slot in group.slots]
    try:
        arrived = await _collect(started, group.keep, profile)
    finally:
        await _cancel(started)
    late = [each.result() for each in started if _has_result(each) and each.result() not in arrived]
    rows = mark_dropped([*arrived, *late], group.keep, profile)
    ended = {episode.sample for episode in rows}
    for slot in group.slots:
        if slot.sample not in ended:
            attempt = attempts.get(slot.sample) or Attempt(player, group.task, slot, group.group_id, 0)
            called_off = attempt.episode(Outcome.ABORTED, b"")
            played(called_off)
            rows.append(called_off)
    return sorted(rows, key=lambda episode: episode.sample)


def mark_dropped(arrived: Sequence[Episode], group_size: int, profile: Profile) -> list[Episode]:
    """`arrived`, with outcome DROPPED for those that `select` does not keep.

    An infra error stays one: nothing came of it to drop.
    """
    kept = {episode.sample for episode in select(arrived, group_size, profile)}
    return [
        (
            episode
            if episode.sample in kept or episode.outcome is Outcome.INFRA_ERROR
            else dataclasses.replace(episode, outcome=Outcome.DROPPED)
        )
        for episode in arrived
    ]


def select(episodes: Sequence[Episode], group_size: int, profile: Profile) -> list[Episode]:
    """The `group_size` episodes to keep, in order of sample; infra errors only if nothing better arrived.

    episodes: in order of arrival. deterministic: the lowest sample indices. throughput: the first to arrive.
    """
    candidates = sorted(episodes, key=lambda episode: episode.sample) if profile == "deterministic" else list(episodes)
    candidates.sort(key=lambda episode: episode.outcome is Outcome.INFRA_ERROR)
    return sorted(candidates[:group_size], key=lambda episode: episode.sample)


def _has_result(task: asyncio.Task[Episode]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _collect(started: Sequence[asyncio.Task[Episode]], keep: int, profile: Profile) -> list[Episode]:
    """All episodes; under the throughput profile only until enough have arrived."""
    arrived: list[Episode] = []
    usable = 0
    for next_one in asyncio.as_completed(started):
        episode = await next_one
        arrived.append(episode)
        usable += episode.outcome is not Outcome.INFRA_ERROR
        if profile == "throughput" and usable == keep:
            break
    return arrived


async def _cancel(tasks: Sequence[asyncio.Task[Episode]]) -> None:
    """Abort running episodes and wait until their sandboxes are released."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
