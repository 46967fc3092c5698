"""Play episodes for an evaluation: the same loop without groups and refills."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from contracts.chat import ChatTokenizer
from contracts.digests import digest_of
from contracts.episodes import Episode, Slot
from contracts.failpoints import failpoint
from contracts.tasks import Split, Task
from envd.client import Limits, SandboxClient
from inference.engines.base import Engine
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.progress import Meter, Progress, no_progress
from inference.rollouts.workspace import Workspaces


def evaluation_slot(experiment: str, split: Split, task_id: str, sample: int, seed: int) -> Slot:
    """Slot, and therefore seed, of an evaluation's episode.

    It names no policy: candidate and parent meet the same random numbers.
    """
    return Slot(experiment, f"eval-{split.value}", task_id, task_id, sample, seed)


async def run_episodes(
    tasks: Sequence[Task],
    samples: int,
    *,
    experiment: str,
    split: Split,
    seed: int,
    key: str,
    policy_version: str,
    config: RolloutConfig,
    engine: Engine,
    sandboxes: SandboxClient,
    tokenizer: ChatTokenizer,
    progress: Progress = no_progress,
    limits: Limits = Limits(),
    gate: asyncio.Semaphore | None = None,
) -> list[Episode]:
    """`samples` episodes of each task, in order of task and sample, at most `config.concurrency` at once; nothing is
    committed.

    gate: bounds the episodes in flight of all calls that share it, in place of the concurrency. key: action key of the
    evaluation run. Group size, over-sampling and refills of `config` do not apply. An episode lost to infrastructure
    comes back as INFRA_ERROR.
    """
    player = Player(
        engine=engine,
        workspaces=Workspaces(sandboxes, limits, config.episode_timeout_s),
        tokenizer=tokenizer,
        config=config,
        policy_version=policy_version,
        key=key,
        gate=gate or asyncio.Semaphore(config.concurrency),
    )
    meter = Meter(0, progress)
    meter.expect(len(tasks), len(tasks) * samples)

    async def play(task: Task, sample: int) -> Episode:
        slot = evaluation_slot(experiment, split, task.task_id, sample, seed)
        group_id = digest_of([key, task.task_id])[:32]
        episode = await play_episode(player, task, slot, group_id)
        meter.episode(episode)
        return episode

    try:
        async with asyncio.TaskGroup() as running:
            playing = [running.create_task(play(task, sample)) for task in tasks for sample in range(samples)]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    failpoint("evaluation-played")
    return [episode.result() for episode in playing]
