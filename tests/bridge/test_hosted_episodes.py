"""Hosted episodes in real sandboxes: they are what a rollout of the same seed is, and every misuse is one error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.episodes import Outcome
from envd.local import LocalEnvd
from inference.bridge.client import BridgeClient
from inference.bridge.client import Episode as Playing
from tests.bridge.hosted_parts import StreamedScript, hosted_bridge, marks
from tests.rollouts.rollouts_script import byte_tokenizer

TASK = "task-000"


@pytest.fixture(scope="module")
def envd() -> Iterator[str]:
    with LocalEnvd() as server:
        yield server.address


async def played(episode: Playing) -> Playing:
    while not episode.done:
        await episode.step()
    return episode


def test_hosted_episode_is_played_and_graded(envd: str, tmp_path: Path) -> None:
    async def run() -> None:
        engine = StreamedScript(byte_tokenizer(), marks)
        async with hosted_bridge(engine, envd, tmp_path), BridgeClient(f"unix:{tmp_path / 'b.sock'}") as client:
            assert (await client.info()).hosted_tasks == 3
            good, bad = [await played(await client.start_task(TASK, seed=seed)) for seed in (1, 2)]
            for episode, reward in ((good, 1.1), (bad, 0.1)):
                reply = episode.turns[-1].reply
                assert reply is not None and reply.outcome == Outcome.COMPLETED
                assert reply.reward == pytest.approx(reward) and reply.verdict == "completed"
                await episode.check()
                await episode.end()

    asyncio.run(run())
