"""A bridge that answers as a test says, for what the real one never does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from contracts.pb import bridge_pb2 as pb
from contracts.pb import bridge_pb2_grpc as rpc

Answer = Callable[[pb.Command, int], AsyncIterator[pb.Event]]
"""Events for a command; the number of the stream, from 1. `cut` ends the stream."""


def looped(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function, on a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


class Cut(Exception):
    """End this stream as a lost connection does."""


class ScriptedBridge(rpc.BridgeServicer):
    """Answers each command in turn."""

    def __init__(self, answer: Answer, credits: int = 8) -> None:
        self.answer, self.credits = answer, credits
        self.streams = 0
        self.commands: list[list[pb.Command]] = []
        """Of each stream."""

    async def Connect(self, request: AsyncIterator[pb.Command], context: Any) -> AsyncIterator[pb.Event]:
        self.streams += 1
        number = self.streams
        self.commands.append([])
        yield pb.Event(credits=self.credits)
        async for command in request:
            self.commands[number - 1].append(command)
            if command.HasField("start"):
                yield pb.Event(id=command.id, state=pb.EpisodeState(episode_id=command.start.episode_id, version="v1"))
                continue
            try:
                async for event in self.answer(command, number):
                    event.id = event.id or command.id
                    yield event
            except Cut:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


def tokens(first: int, ids: list[int], version: str = "v1") -> pb.Event:
    data = np.array(ids, "<i4").tobytes()
    logprobs = (-np.array(ids, "<f4") / 8).tobytes()
    spans = [pb.Span(version=version, first=first, end=first + len(ids))]
    return pb.Event(step=pb.StepEvent(tokens=pb.Tokens(first=first, ids=data, logprobs=logprobs, spans=spans)))


def finished(count: int) -> pb.Event:
    return pb.Event(step=pb.StepEvent(end=pb.StepEnd(finish=pb.STOP, tokens=count)))


@contextlib.asynccontextmanager
async def scripted(folder: Path, answer: Answer, credits: int = 8) -> AsyncIterator[tuple[ScriptedBridge, str]]:
    """A bridge that answers so, and its address."""
    bridge, server = ScriptedBridge(answer, credits), grpc.aio.server()
    rpc.add_BridgeServicer_to_server(bridge, server)
    address = f"unix:{folder / 's.sock'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield bridge, address
    finally:
        await server.stop(None)
