"""Sample one group: start its episodes together, over-sample, select. Episodes that are not kept leave a row with
tokens.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from contracts.episodes import Episode, Outcome
from contracts.tasks import Task
from inference.rollouts.config import Profile, RolloutConfig
from inference.rollouts.episode import Attempt, Player, play_episode
from inference.rollouts.plan import GroupPlan, RolloutPlan


async def sample_group(
    player: Player, plan: RolloutPlan, group: GroupPlan, task: Task, played: Callable[[Episode], None]
) -> list[Episode]:
    """All episodes that were started, in order of sample; those not kept are DROPPED or ABORTED. played: called at the
    end of each.
    """
    config = plan.config
    attempts: dict[int, Attempt] = {}

    async def play(sample: int) -> Episode:
        slot = plan.slot(group, sample)
        episode = await play_episode(
            player, task, slot, group.group_id, begun=lambda attempt: attempts.__setitem__(sample, attempt)
        )
        played(episode)
        return episode

    started = [asyncio.create_task(play(sample)) for sample in range(config.episodes_started)]
    try:
        arrived = await _collect(started, config)
    finally:
        await _cancel(started)
    late = [each.result() for each in started if _has_result(each) and each.result() not in arrived]
    rows = mark_dropped([*arrived, *late], config.group_size, config.profile)
    for sample in sorted(set(range(config.episodes_started)) - {episode.sample for episode in rows}):
        attempt = attempts.get(sample) or Attempt(player, task, plan.slot(group, sample), group.group_id, 0)
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


async def _collect(started: Sequence[asyncio.Task[Episode]], config: RolloutConfig) -> list[Episode]:
    """All episodes; under the throughput profile only until enough have arrived."""
    arrived: list[Episode] = []
    usable = 0
    for next_one in asyncio.as_completed(started):
        episode = await next_one
        arrived.append(episode)
        usable += episode.outcome is not Outcome.INFRA_ERROR
        if config.profile == "throughput" and usable == config.group_size:
            break
    return arrived


async def _cancel(tasks: Sequence[asyncio.Task[Episode]]) -> None:
    """Abort running episodes and wait until their sandboxes are released."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
