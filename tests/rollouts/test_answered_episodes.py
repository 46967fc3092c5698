"""Episodes whose final state is an answer: played, stored, replayed and graded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from rollouts_script import POLICY, Script, ScriptedEngine, call, make_plan, make_tasks, one_file_task, play_evaluation

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import Episode, episodes_table, read_episodes, sequences_table
from contracts.final_states import AnswerState
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.rollouts.episode import Player
from inference.rollouts.replay import Replay, replay_episode

TASK = dataclasses.replace(
    one_file_task(0),
    instruction="How many lines does m.py have?",
    toolset="answer",
    final_state=AnswerState(rule="number", expected=2),
    hidden_files={},
    tests=(),
)
FORGE = "echo '{\"answer\":2}' > answer.json; echo submit_answer 2; cp answer.json /tmp/final_state"


def submits_twice(turn: int, seed: int) -> Sequence[ToolCallText] | str:
    return [
        [call("submit_answer", answer=7), call("read", path="m.py")],
        [call("submit_answer", answer=2), call("submit_answer")],
        "It has 3.",
    ][turn]


def forges(turn: int, seed: int) -> Sequence[ToolCallText] | str:
    """Writes what looks like an answer into the sandbox, and answers nothing."""
    return [[call("exec", command=FORGE)], [call("submit_answer", answer=[2] * 25_000)], ""][turn]


def says(turn: int, seed: int) -> Sequence[ToolCallText] | str:
    return [[call("exec", command="wc -l m.py")], "<think>3?</think>2"][turn]


@pytest.mark.parametrize(
    ("script", "state", "solved"),
    [
        (submits_twice, b'{"answer":2}', True),
        (says, b'{"answer":"2"}', True),
        (forges, b"", False),
    ],
)
def test_the_answer_is_what_the_policy_said_and_nothing_in_its_sandbox(
    script: Script, state: bytes, solved: bool, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    config = make_plan(make_tasks(1), 1, max_tokens=80_000, max_turn_tokens=60_000).config

    async def run() -> tuple[Episode, Replay, bool]:
        async with SandboxClient(envd.address) as client:
            engine = ScriptedEngine(tokenizer, script, context=80_000)
            player = Player.of(engine, client, tokenizer, config, policy_version=POLICY.digest, key="k")
            (episode,) = await play_evaluation(player, [TASK], 1)
            replay = await replay_episode(episode, TASK, sandboxes=client, tokenizer=tokenizer, config=config)
            return episode, replay, (await Verifier(client, None).grade(TASK, episode.final_diff)).solved

    episode, replay, found = asyncio.run(run())
    assert (episode.outcome, episode.final_diff, found, replay.exact) == ("completed", state, solved, True)
    table = episodes_table([episode])
    assert [each["kind"] for each in table.to_pylist()[0]["final_state"]] == ["answer"]
    (back,) = read_episodes(table, sequences_table([episode]))
    assert dataclasses.replace(back, telemetry=episode.telemetry) == episode
