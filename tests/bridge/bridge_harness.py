"""Parts of the bridge's tests: a server in this process or in one of its own, and a client of the bare protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from contracts.pb import bridge_pb2 as pb
from contracts.pb import bridge_pb2_grpc as rpc
from contracts.rpc.listening import Listening
from inference.bridge.checks import Limits
from inference.bridge.serve import Bridge, Options, limits_of, serving
from inference.engines.base import Engine, Piece, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7, 8]
KEY = "k" * 16


def ids(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def tokens_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def new_id() -> str:
    return secrets.token_hex(16)


def start_request(episode_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.StartEpisodeRequest:
    sampling = fields.pop("sampling", pb.Sampling(max_tokens=24, seed=7))
    return pb.StartEpisodeRequest(episode_id=episode_id, prompt_ids=ids(prompt), sampling=sampling, **fields)


class Turned:
    """What a client has of one step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int, int]] = []
        self.finish: int | None = None

    def add(self, event: pb.StepEvent) -> None:
        assert self.finish is None and (event.HasField("tokens") or event.HasField("end"))
        if event.HasField("tokens"):
            self._add(event.tokens)
        if event.HasField("end"):
            assert event.end.tokens == len(self.tokens)
            self.finish = event.end.finish

    def _add(self, new: pb.Tokens) -> None:
        assert new.first == len(self.tokens) and len(new.ids) == len(new.logprobs) > 0
        place = new.first
        for span in new.spans:
            assert span.first == place < span.end
            if self.spans and self.spans[-1][0] == span.version:
                self.spans[-1] = (span.version, self.spans[-1][1], span.end)
            else:
                self.spans.append((span.version, span.first, span.end))
            place = span.end
        self.tokens += tokens_of(new.ids)
        self.logprobs += np.frombuffer(new.logprobs, "<f4").tolist()
        assert place == len(self.tokens)


class Client:
    """Calls of one key."""

    def __init__(self, channel: grpc.aio.Channel, key: str = "") -> None:
        self.stub: Any = rpc.BridgeStub(channel)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()

    async def start(self, request: pb.StartEpisodeRequest) -> pb.EpisodeState:
        return await self.stub.StartEpisode(request, metadata=self.metadata)

    def step_call(self, episode_id: str, step: int, observation: Sequence[int] = (), **fields: Any) -> Any:
        request = pb.StepRequest(episode_id=episode_id, step=step, observation_ids=ids(observation), **fields)
        return self.stub.Step(request, metadata=self.metadata)

    async def step(self, episode_id: str, step: int, observation: Sequence[int] = (), **fields: Any) -> Turned:
        turned = Turned()
        async for event in self.step_call(episode_id, step, observation, **fields):
            assert (event.episode_id, event.step) == (episode_id, step)
            turned.add(event)
        assert turned.finish is not None
        return turned

    async def end(self, episode_id: str, **fields: Any) -> tuple[bytes, str]:
        """The record and its digest."""
        request = pb.EndEpisodeRequest(episode_id=episode_id, **fields)
        chunks = [chunk async for chunk in self.stub.EndEpisode(request, metadata=self.metadata)]
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        return b"".join(chunk.data for chunk in chunks), chunks[-1].digest

    async def state(self, episode_id: str) -> pb.EpisodeState:
        return await self.stub.GetEpisode(pb.EpisodeName(episode_id=episode_id), metadata=self.metadata)

    async def cancel(self, episode_id: str, step: int) -> pb.EpisodeState:
        return await self.stub.CancelStep(pb.StepName(episode_id=episode_id, step=step), metadata=self.metadata)

    async def renew(self, *episode_ids: str) -> list[str]:
        reply = await self.stub.Renew(pb.RenewRequest(episode_ids=episode_ids), metadata=self.metadata)
        return list(reply.lost)


def failure_of(error: grpc.aio.AioRpcError) -> tuple[str, str, str]:
    """Status, error name and message of a failed call."""
    trailing = dict(error.trailing_metadata() or ())
    return error.code().name, str(trailing.get("triplane-error")), error.details() or ""


@contextlib.asynccontextmanager
async def refused(status: str, name: str, words: str = "") -> AsyncIterator[None]:
    """Expect a call to fail with this status and error name, and with these words in its message."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        found = failure_of(error)
        assert found[:2] == (status, name) and words in found[2], found
    else:
        raise AssertionError(f"not refused: {name}")


@contextlib.asynccontextmanager
async def bridged(
    engine: Engine, limits: Limits, folder: Path, *, keys: Sequence[str] = (), **options: Any
) -> AsyncIterator[tuple[Client, Bridge]]:
    """A server of `engine` on a Unix socket, and a client of it with the first key."""
    key_file = folder / "keys" if keys else None
    if key_file is not None:
        key_file.write_text("\n".join(keys))
    listening = Listening(f"unix:{folder / 'b.sock'}", key_file=key_file)
    async with serving(engine, limits, Options(listening, **options)) as bridge:
        async with grpc.aio.insecure_channel(bridge.address) as channel:
            yield Client(channel, keys[0] if keys else ""), bridge


@contextlib.asynccontextmanager
async def builtin_bridge(
    policy: Path, folder: Path, **options: Any
) -> AsyncIterator[tuple[Client, Bridge, BuiltinEngine]]:
    """A server of the built-in engine with `policy`."""
    engine = BuiltinEngine(policy, "v1", threads=1)
    try:
        async with bridged(engine, limits_of(policy), folder, **options) as (client, bridge):
            yield client, bridge, engine
    finally:
        await engine.close()


class HeldEngine(DelegatingEngine):
    """The built-in engine, whose streams stop after so many tokens until they are let go on. Counts its calls."""

    def __init__(self, inner: BuiltinEngine, hold_after: int = 1 << 30) -> None:
        super().__init__(inner)
        self.hold_after = hold_after
        self.go_on = asyncio.Event()
        self.streams = 0

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        self.streams += 1
        given = 0
        async with contextlib.aclosing(self.inner.stream(prompt_ids, params)) as pieces:
            async for piece in pieces:
                for place in range(len(piece.token_ids)):
                    last = place == len(piece.token_ids) - 1
                    if given >= self.hold_after:
                        await self.go_on.wait()
                    version = next(name for name, first, end in piece.spans if first <= place < end)
                    one = slice(place, place + 1)
                    reason = piece.finish_reason if last else None
                    drawn = (None, None, None)
                    if piece.supports is not None:
                        forced, masses = piece.forced and piece.forced[one], piece.log_mass and piece.log_mass[one]
                        drawn = piece.supports.between(place, place + 1), forced, masses
                    yield Piece(piece.token_ids[one], piece.logprobs[one], [(version, 0, 1)], reason, *drawn)
                    given += 1


@contextlib.asynccontextmanager
async def held_bridge(
    policy: Path, folder: Path, hold_after: int = 1 << 30, **options: Any
) -> AsyncIterator[tuple[Client, Bridge, HeldEngine]]:
    """A server of a HeldEngine with `policy`."""
    engine = HeldEngine(BuiltinEngine(policy, "v1", threads=1), hold_after)
    try:
        async with bridged(engine, limits_of(policy), folder, **options) as (client, bridge):
            yield client, bridge, engine
    finally:
        await engine.close()


@contextlib.contextmanager
def process(
    policy: Path, listen: str, *options: str, command: str = "bridge", named: str = "--policy"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m inference bridge` in a process of its own, and the address that it printed."""
    words = [sys.executable, "-m", "inference", command, named, str(policy), "--listen", listen, *options]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    running = subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None and running.stderr is not None
        line = running.stdout.readline()
        assert " at " in line, running.stderr.read()
        yield running, line.split(" at ")[1].split(",")[0].strip()
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
        running.communicate()
