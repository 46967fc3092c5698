"""Client side of the `bridge` benchmark: latencies, rates and open episodes."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks.bridge_server import ECHO, SIZE
from contracts.pb import bridge_pb2 as pb
from inference.bridge.client import BridgeClient, Sampling

TOKENS = 64
"""Of each measured step."""
WIDTH = 64
"""Episodes that step at the same time."""
_TURNS = 32
"""Steps of an episode, after which another one goes on: contexts stay short."""
_PROMPT = np.arange(64, dtype=np.int32)
_SAMPLING = Sampling(max_tokens=TOKENS, seed=1)


class Rate(NamedTuple):
    """A measured rate."""

    steps: int
    per_second: float


async def step_seconds(client: BridgeClient, count: int) -> list[float]:
    """Seconds of each of `count` steps, one after the other."""
    found: list[float] = []
    while len(found) < count:
        async with await client.start(_PROMPT, sampling=_SAMPLING) as episode:
            for _ in range(_TURNS):
                begin = time.perf_counter()
                turn = await episode.step()
                found.append(time.perf_counter() - begin)
                assert len(turn.token_ids) == TOKENS
    return found


async def steps_per_second(client: BridgeClient, count: int) -> Rate:
    """Steps per second of WIDTH episodes at a time; their starts and ends do not count."""
    seconds, done = 0.0, 0
    while done < count:
        episodes = await asyncio.gather(*(client.start(_PROMPT, sampling=_SAMPLING) for _ in range(WIDTH)))

        async def play(episode: Any) -> None:
            for _ in range(_TURNS):
                await episode.step()

        begin = time.perf_counter()
        await asyncio.gather(*(play(each) for each in episodes))
        seconds += time.perf_counter() - begin
        done += WIDTH * _TURNS
        await asyncio.gather(*(each.end() for each in episodes))
    return Rate(done, done / seconds)


async def echo_seconds(address: str, count: int) -> dict[str, list[float]]:
    """Seconds of bare round trips with the bytes of a step: a unary call, and on a stream one message for two."""
    command, first, second = _step_bytes()
    found: dict[str, list[float]] = {"unary": [], "stream": []}
    async with grpc.aio.insecure_channel(address) as channel:
        one: Any = channel.unary_unary(f"/{ECHO}/One")
        await one(SIZE.pack(len(first)) + first + second)
        command = SIZE.pack(0) + command
        for _ in range(count):
            begin = time.perf_counter()
            await one(command)
            found["unary"].append(time.perf_counter() - begin)
        call: Any = channel.stream_stream(f"/{ECHO}/Many")()
        for _ in range(count):
            begin = time.perf_counter()
            await call.write(command)
            await call.read()
            await call.read()
            found["stream"].append(time.perf_counter() - begin)
        call.cancel()
    return found


async def hold_open(client: BridgeClient, count: int, tokens: int) -> None:
    """Open `count` episodes of `tokens` tokens, half of them the policy's, and let go of them."""
    sampling = Sampling(max_tokens=tokens // 2, seed=1)
    prompt = np.arange(tokens - tokens // 2, dtype=np.int32)

    async def one() -> None:
        episode = await client.start(prompt, sampling=sampling)
        await episode.step()
        episode.release()

    for _ in range(0, count, WIDTH):
        await asyncio.gather(*(one() for _ in range(WIDTH)))


def _step_bytes() -> tuple[bytes, bytes, bytes]:
    """The command of a step and its two events: its tokens and its end."""
    ids, logprobs = np.arange(TOKENS, dtype="<i4").tobytes(), np.zeros(TOKENS, "<f4").tobytes()
    spans = [pb.Span(version="echo", first=0, end=TOKENS)]
    name = "0" * 32
    command = pb.Command(id=1, step=pb.StepRequest(episode_id=name, step=1))
    tokens = pb.StepEvent(episode_id=name, step=1, tokens=pb.Tokens(ids=ids, logprobs=logprobs, spans=spans))
    end = pb.StepEvent(episode_id=name, step=1, end=pb.StepEnd(finish=pb.LENGTH, tokens=TOKENS))
    events = (pb.Event(id=1, step=each).SerializeToString() for each in (tokens, end))
    return (command.SerializeToString(), *events)  # type: ignore[return-value]
