"""Episodes on disk are what happened: replayed, they give every environment token and the final diff; graded by others,
the same verdicts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, read_episodes
from contracts.tasks import Task, read_tasks
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.rollouts.replay import Replay, replay_episode
from tests.acceptance.laboratory import ROOT, Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SAMPLE = 50


def all_episodes(laboratory: Laboratory) -> list[Episode]:
    tables = [laboratory.artifact("rollouts", f"{number:04d}") for number in range(5)]
    return [
        episode
        for each in tables
        for episode in read_episodes(each.table("episodes.parquet"), each.table("sequences.parquet"))
    ]


def sampled(laboratory: Laboratory) -> list[Episode]:
    return random.Random(7).sample(all_episodes(laboratory), SAMPLE)


def tasks_of(laboratory: Laboratory) -> dict[str, Task]:
    return {task.task_id: task for task in read_tasks(laboratory.artifact("task_suite").table("tasks.parquet"))}


def test_the_median_episode_has_two_tool_turns(learned: Laboratory) -> None:
    turns = [len({call.turn for call in episode.tool_calls}) for episode in all_episodes(learned)]
    assert statistics.median(turns) >= 2


def test_replays_reproduce_every_environment_token_and_the_diff(learned: Laboratory) -> None:
    tasks, episodes = tasks_of(learned), sampled(learned)
    tokenizer = ChatTokenizer.from_directory(learned.artifact("base_policy").directory())

    async def replay_all(address: str) -> list[Replay]:
        async with SandboxClient(address) as client:
            return await asyncio.gather(
                *(
                    replay_episode(
                        each,
                        tasks[each.task_id],
                        sandboxes=client,
                        tokenizer=tokenizer,
                        config=learned.experiment.rollouts,
                    )
                    for each in episodes
                )
            )

    with LocalEnvd() as envd:
        replays = asyncio.run(replay_all(envd.address))
    assert sum(replay.environment_tokens for replay in replays) > SAMPLE
    assert [replay for replay in replays if not replay.exact] == []


def test_an_independent_grader_agrees_on_every_sampled_episode(learned: Laboratory, tmp_path: Path) -> None:
    tasks, episodes = tasks_of(learned), sampled(learned)
    rewards = pa.concat_tables(
        learned.artifact("rewards", f"{number:04d}").table("rewards.parquet") for number in range(5)
    )
    solved = dict(zip(rewards["episode_id"].to_pylist(), rewards["solved"].to_pylist(), strict=True))
    rows = [
        {
            "id": each.episode_id,
            "files": encoded(tasks[each.task_id].files),
            "diff": base64.b64encode(each.final_diff).decode(),
            "hidden_files": encoded(tasks[each.task_id].hidden_files),
            "tests": list(tasks[each.task_id].tests),
        }
        for each in episodes
    ]
    (tmp_path / "episodes.json").write_text(json.dumps(rows))
    script = ROOT / "tests" / "curation" / "regrade_independent.py"
    done = subprocess.run(
        [sys.executable, "-I", str(script), str(tmp_path / "episodes.json")], capture_output=True, text=True, check=True
    )
    graded = {line.split()[0]: line.split()[1] == "passed" for line in done.stdout.splitlines() if line.strip()}
    assert graded == {each.episode_id: solved[each.episode_id] for each in episodes}
    assert len(set(graded.values())) == 2, "a sample of one verdict proves nothing"


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in files.items()}
