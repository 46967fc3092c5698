"""What an open episode costs, and that a closed one gives it back."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from contracts.pb import bridge_pb2 as pb
from inference.bridge.checks import Limits
from inference.bridge.sessions import Bounds, Sessions
from inference.engines.base import Piece, SamplingParams
from tests.bridge.bridge_harness import Turned, ids, new_id, start_request

EPISODES, TURNS, SAMPLED, OBSERVED = 1000, 7, 64, 8


class Fast:
    """An engine that samples the same token over and over: real ones would take minutes for these episodes."""

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        count = params.max_tokens
        yield Piece(np.ones(count, np.int32), np.zeros(count, np.float32), [("v1", 0, count)], "length")

    async def version(self) -> str:
        return "v1"


async def play(sessions: Sessions, name: str) -> None:
    await sessions.start("key", start_request(name, [1] * 16, sampling=pb.Sampling(max_tokens=SAMPLED)))
    for step in range(1, TURNS + 1):
        ready, event = asyncio.Event(), pb.StepEvent()
        observed = ids([2] * OBSERVED if step > 1 else [])
        request = pb.StepRequest(episode_id=name, step=step, observation_ids=observed)
        reader = sessions.step("key", request, lambda _, ready=ready: ready.set())  # type: ignore[misc]
        while not reader.done:
            if not reader.take(event):
                await ready.wait()
                ready.clear()
        sessions.leave(reader)


def test_long_turn_is_read_in_messages_of_limited_size() -> None:
    async def run() -> None:
        engine: Any = Fast()
        sessions, name, ready = Sessions(engine, Limits(96, 1 << 20), Bounds()), new_id(), asyncio.Event()
        await sessions.start("key", start_request(name, sampling=pb.Sampling(max_tokens=40_000)))
        request = pb.StepRequest(episode_id=name, step=1)
        first = sessions.step("key", request, lambda _: ready.set())
        await ready.wait()
        for reader in (first, sessions.step("key", request, lambda _: None)):
            turned = Turned()
            while not reader.done:
                event = pb.StepEvent()
                assert reader.take(event)
                assert event.ByteSize() < 140_000
                turned.add(event)
            assert turned.spans == [("v1", 0, 40_000)] and turned.finish == pb.LENGTH

    asyncio.run(run())


@pytest.mark.slow
def test_open_episode_of_512_tokens_takes_at_most_16_kib_and_a_closed_one_none() -> None:
    async def run() -> None:
        engine: Any = Fast()
        sessions = Sessions(engine, Limits(96, 4096), Bounds(lease_s=3600, kept_s=0))
        await play(sessions, new_id())
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        names = [new_id() for _ in range(EPISODES)]
        for name in names:
            await play(sessions, name)
        each = (tracemalloc.get_traced_memory()[0] - before) / EPISODES
        assert sessions.state("key", names[0]).tokens == 512
        assert each <= 16 * 1024, f"{each:.0f} bytes an episode"
        for name in names[: EPISODES // 2]:
            sessions.end("key", pb.EndEpisodeRequest(episode_id=name))
        for episode in list(sessions._episodes.values()):
            episode.expires = 0.0
        sessions.sweep()
        await asyncio.sleep(0.01)
        sessions.sweep()
        left = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert sessions.open == 0 and left < each * EPISODES / 10, f"{left} bytes are left"

    asyncio.run(run())
