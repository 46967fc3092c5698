"""A bridge that hosts episodes is killed at every step of the environment's side. No call is executed twice."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.episodes import Outcome
from contracts.failpoints import POINTS
from envd.local import LocalEnvd
from inference.bridge.client import BridgeClient
from tests.bridge.hosted_parts import (
    TASKS,
    StreamedScript,
    killable,
    marks,
    nothing_left,
    played,
    rolled_out,
    rows_of,
    settings,
)
from tests.bridge.scripted_bridge import looped
from tests.rollouts.rollouts_script import byte_tokenizer

pytestmark = pytest.mark.slow
TASK, SEED = "task-001", 3
OURS = [point for point in POINTS if point.startswith("hosted-") and point != "hosted-closing"]
LATER = ["hosted-sending:3", "hosted-answered:2", "hosted-answered:4"]


@pytest.fixture(scope="module")
def envd() -> Iterator[str]:
    with LocalEnvd() as server:
        yield server.address


async def check(record: object, envd: str) -> None:
    row, sequence, about = rows_of(record)  # type: ignore[arg-type]
    engine = StreamedScript(byte_tokenizer(), marks)
    expected, tokens, reward = await rolled_out(engine, envd, TASKS[TASK], SEED, settings(), byte_tokenizer())
    assert row["final_diff"].count(b"+0\n+1\n+2\n") == 1 and row["final_diff"] == expected["final_diff"]
    assert row["tool_calls"] == expected["tool_calls"] and row["outcome"] == expected["outcome"]
    assert sequence["token_ids"] == tokens["token_ids"] and sequence["logprobs"] == tokens["logprobs"]
    assert about["reward"] == reward == pytest.approx(1.1)


@pytest.mark.parametrize("point", [*OURS, *LATER])
@looped
async def test_kill_executes_no_call_twice_and_changes_nothing(envd: str, tmp_path: Path, point: str) -> None:
    async with BridgeClient(f"unix:{tmp_path / 'b.sock'}") as client:
        with killable(tmp_path, envd, kill_at=point) as first:
            playing = asyncio.create_task(played(await client.start_task(TASK, seed=SEED)))
            assert await asyncio.to_thread(first.wait, 120) == -signal.SIGKILL
        with killable(tmp_path, envd):
            record = await playing
    await check(record, envd)
    await nothing_left(envd)


@looped
async def test_kills_at_random_times_change_nothing(envd: str, tmp_path: Path) -> None:
    chance, kills = random.Random(4), 0
    async with BridgeClient(f"unix:{tmp_path / 'b.sock'}") as client:
        with killable(tmp_path, envd) as running:
            playing = asyncio.create_task(played(await client.start_task(TASK, seed=SEED)))
            await asyncio.wait([playing], timeout=0.4)
            running.kill()
        while not playing.done():
            kills += 1
            with killable(tmp_path, envd) as running:
                await asyncio.wait([playing], timeout=chance.uniform(0.1, 1.0) if kills < 8 else 120)
                running.kill()
        await check(await playing, envd)
    assert kills > 1, "the first kill came too late"
    await nothing_left(envd)


@looped
async def test_final_state_that_envd_can_not_keep_is_lost_to_a_kill(envd: str, tmp_path: Path) -> None:
    async with BridgeClient(f"unix:{tmp_path / 'b.sock'}") as client:
        with killable(tmp_path, envd, "big", kill_at="hosted-taken") as first:
            playing = asyncio.create_task(played(await client.start_task(TASK)))
            assert await asyncio.to_thread(first.wait, 120) == -signal.SIGKILL
        with killable(tmp_path, envd, "big"):
            row, _, about = rows_of(await playing)
    assert row["outcome"] == Outcome.INFRA_ERROR and about["reward"] is None
    assert "final state that was taken is lost" in about["failure"]
    await nothing_left(envd)


@looped
async def test_kill_after_the_end_of_an_episode_leaves_no_sandbox(envd: str, tmp_path: Path) -> None:
    async with BridgeClient(f"unix:{tmp_path / 'b.sock'}") as client:
        with killable(tmp_path, envd, "reads", kill_at="hosted-closing") as first:
            episode = await client.start_task(TASK)
            await episode.step()
            ending = asyncio.create_task(episode.end())
            assert await asyncio.to_thread(first.wait, 60) == -signal.SIGKILL
        with killable(tmp_path, envd, "reads"):
            assert rows_of(await ending)[0]["outcome"] == Outcome.ABORTED
            await nothing_left(envd)
