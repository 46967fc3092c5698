"""A bridge that is killed again and again, under load, at random times."""

from __future__ import annotations

import asyncio
import random
import subprocess
from pathlib import Path

import grpc
import pytest

from contracts.pb import bridge_pb2 as pb
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from tests.bridge.bridge_harness import PROMPT, Client, Turned, new_id, process, start_request
from tests.inference.conftest import write_checkpoint

pytestmark = pytest.mark.slow
EPISODES, TURNS, KILLS = 16, 6, 8


class Playing:
    """One episode, over all bridges."""

    def __init__(self, seed: int) -> None:
        self.seed, self.name, self.chance = seed, new_id(), random.Random(seed)
        self.prompt = [*PROMPT, seed]
        self.turns: list[tuple[list[int], Turned]] = []
        self.record: tuple[bytes, str] | None = None

    async def play(self, client: Client) -> None:
        """Go on until the end, or until the bridge is gone."""
        sampling = pb.Sampling(max_tokens=100, seed=self.seed)
        await client.start(start_request(self.name, self.prompt, sampling=sampling))
        while len(self.turns) < TURNS or self.turns[-1][1].finish is None:
            if not self.turns or self.turns[-1][1].finish is not None:
                observed = [self.chance.randrange(96) for _ in range(self.chance.randrange(9))] if self.turns else []
                self.turns.append((observed, Turned()))
            observed, turned = self.turns[-1]
            call = client.step_call(self.name, len(self.turns), observed, from_token=len(turned.tokens))
            async for event in call:
                turned.add(event)
        record = await client.end(self.name, reward=float(self.seed))
        assert self.record in (None, record)
        self.record = record

    async def check(self, engine: BuiltinEngine) -> None:
        """Compare every turn with an undisturbed one."""
        context = list(self.prompt)
        for observed, turned in self.turns:
            context += observed
            expected = await engine.generate(context, SamplingParams(1.0, 100, self.seed))
            assert (turned.tokens, turned.logprobs) == (expected.token_ids, expected.logprobs)
            assert turned.finish == pb.LENGTH
            context += turned.tokens


def test_no_kill_changes_loses_or_repeats_a_token(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "p", 0, max_position_embeddings=4096)
    options = ("--journal", str(tmp_path / "journal"), "--version", "v1")
    playing, chance = [Playing(seed) for seed in range(EPISODES)], random.Random(1)

    async def against(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            results = await asyncio.gather(*(each.play(Client(channel)) for each in playing), return_exceptions=True)
        for result in results:
            if isinstance(result, grpc.aio.AioRpcError):
                assert result.code() is grpc.StatusCode.UNAVAILABLE
            elif result is not None:
                raise result

    async def killed(address: str, running: subprocess.Popen[str]) -> None:
        task = asyncio.create_task(against(address))
        await asyncio.wait([task], timeout=chance.uniform(0.05, 0.7))
        running.kill()
        await task

    for _ in range(KILLS):
        with process(policy, f"unix:{tmp_path / 'b.sock'}", *options) as (running, address):
            asyncio.run(killed(address, running))
    cut = sum(each.record is None for each in playing)
    with process(policy, f"unix:{tmp_path / 'b.sock'}", *options) as (_, address):
        asyncio.run(against(address))
    assert cut, "the kills came too late to cut an episode"

    async def check() -> None:
        engine = BuiltinEngine(policy, "v1", threads=1)
        for each in playing:
            await each.check(engine)
        await engine.close()

    asyncio.run(check())
    assert all(each.record for each in playing)
