from __future__ import annotations

import asyncio
import dataclasses

import pytest
from rollouts_script import (
    POLICY,
    ScriptedEngine,
    make_plan,
    make_tasks,
    one_file_task,
    play_evaluation,
    read_then_maybe_fix,
)

from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, TokenRole
from contracts.tasks import Task
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.errors import RolloutError
from inference.rollouts.episode import Player
from inference.rollouts.replay import Replay, replay_episode

TASKS = make_tasks(3)


def test_a_replay_reproduces_every_environment_token_and_the_diff(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    config = make_plan(TASKS, 1).config

    async def run() -> tuple[list[Episode], list[Replay], Replay]:
        async with SandboxClient(envd.address) as client:
            engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
            player = Player.of(engine, client, tokenizer, config, policy_version=POLICY.digest, key="k")
            played = await play_evaluation(player, TASKS.values(), 2)

            async def replay(episode: Episode) -> Replay:
                task = TASKS[episode.task_id]
                return await replay_episode(episode, task, sandboxes=client, tokenizer=tokenizer, config=config)

            forged = dataclasses.replace(played[0], final_diff=played[0].final_diff + b"x")
            forged.sequences[0].token_ids[forged.sequences[0].token_role.index(TokenRole.ENVIRONMENT) + 8] += 1
            found = [await replay(episode) for episode in played[1:]]
            broken = await replay(forged)
            with pytest.raises(RolloutError, match="another version of task"):
                task = dataclasses.replace(one_file_task(0), instruction="other")
                await replay_episode(played[0], task, sandboxes=client, tokenizer=tokenizer, config=config)
            return played[1:], found, broken

    played, found, broken = asyncio.run(run())
    assert all(replay.exact for replay in found)
    assert [replay.environment_tokens for replay in found] == [
        episode.sequences[0].token_role.count(TokenRole.ENVIRONMENT) for episode in played
    ]
    assert (broken.exact, broken.differing_turn, broken.same_diff) == (False, 0, False)


def test_only_the_deliverables_of_a_task_are_played_and_replayed(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    config = make_plan(TASKS, 1).config
    (path,) = [path for path in one_file_task(0).files if path.endswith(".py")]
    tasks = [dataclasses.replace(one_file_task(0), deliverables=(each,)) for each in (path, "elsewhere/")]

    async def played(task: Task) -> tuple[list[Episode], list[Replay]]:
        async with SandboxClient(envd.address) as client:
            engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
            player = Player.of(engine, client, tokenizer, config, policy_version=POLICY.digest, key="k")
            episodes = await play_evaluation(player, [task], 4)
            options = {"sandboxes": client, "tokenizer": tokenizer, "config": config}
            return episodes, [await replay_episode(each, task, **options) for each in episodes]

    declared, other = (asyncio.run(played(task)) for task in tasks)
    assert any(episode.final_diff for episode in declared[0])
    assert not any(episode.final_diff for episode in other[0])
    assert all(replay.exact for replay in [*declared[1], *other[1]])
