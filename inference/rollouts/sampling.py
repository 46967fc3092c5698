"""The samples of one group: started together, over-sampled, selected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from contracts.episodes import Episode, Outcome
from contracts.tasks import Task
from inference.rollouts.config import Profile, RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.plan import GroupPlan, RolloutPlan


async def sample_group(
    player: Player, plan: RolloutPlan, group: GroupPlan, task: Task, played: Callable[[Episode], None]
) -> list[Episode]:
    """The episodes of a group that are kept, in order of sample. played: told of every episode that ended, kept or not."""

    async def play(sample: int) -> Episode:
        episode = await play_episode(player, task, plan.slot(group, sample), group.group_id)
        played(episode)
        return episode

    config = plan.config
    started = [asyncio.create_task(play(sample)) for sample in range(config.episodes_started)]
    try:
        return select(await _collect(started, config), config.group_size, config.profile)
    finally:
        await _cancel(started)


def select(episodes: Sequence[Episode], group_size: int, profile: Profile) -> list[Episode]:
    """The `group_size` episodes to keep, in order of sample; infra errors only where nothing better came.

    episodes: in order of arrival. deterministic: the lowest sample indices. throughput: the first to arrive.
    """
    candidates = sorted(episodes, key=lambda episode: episode.sample) if profile == "deterministic" else list(episodes)
    candidates.sort(key=lambda episode: episode.outcome is Outcome.INFRA_ERROR)
    return sorted(candidates[:group_size], key=lambda episode: episode.sample)


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
    """Abort what still runs and wait until it has let go of its sandbox."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
