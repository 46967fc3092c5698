"""Connect: many episodes over one stream, its credits, and clients that read late or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.pb import bridge_pb2 as pb
from inference.bridge.registry import Bounds
from inference.bridge.serve import limits_of
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from tests.bridge.bridge_harness import (
    KEY,
    PROMPT,
    Client,
    Turned,
    bridged,
    builtin_bridge,
    held_bridge,
    ids,
    new_id,
    refused,
    start_request,
)
from tests.inference.conftest import write_checkpoint


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0)


class Stream:
    """A Connect stream: commands are numbered, and events sorted by them."""

    def __init__(self, client: Client) -> None:
        self.call: Any = client.stub.Connect(metadata=client.metadata)
        self.events: dict[int, asyncio.Queue[pb.Event]] = defaultdict(asyncio.Queue)
        self.sent = 0
        self.writing = asyncio.Lock()
        self.reading: asyncio.Task[None] | None = None

    def read(self) -> None:
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (event := await self.call.read()) is not grpc.aio.EOF:
            self.events[event.id].put_nowait(event)

    async def send(self, **what: Any) -> int:
        async with self.writing:
            self.sent += 1
            identity = self.sent
            await self.call.write(pb.Command(id=identity, **what))
            return identity

    async def ask(self, **what: Any) -> pb.Event:
        return await self.events[await self.send(**what)].get()

    async def step(self, episode_id: str, step: int, observation: Sequence[int] = (), **fields: Any) -> Turned:
        request = pb.StepRequest(episode_id=episode_id, step=step, observation_ids=ids(observation), **fields)
        return await self.turn(await self.send(step=request))

    async def turn(self, identity: int) -> Turned:
        turned = Turned()
        while turned.finish is None:
            event = await self.events[identity].get()
            assert event.WhichOneof("what") == "step", event
            turned.add(event.step)
        return turned


@contextlib.asynccontextmanager
async def connected(client: Client) -> AsyncIterator[Stream]:
    stream = Stream(client)
    stream.read()
    try:
        yield stream
    finally:
        stream.call.cancel()
        assert stream.reading is not None
        await asyncio.gather(stream.reading, return_exceptions=True)


def test_many_episodes_run_over_one_stream(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, engine), connected(client) as stream:
            assert (await stream.events[0].get()).credits == Bounds().credits
            names = [new_id() for _ in range(20)]

            async def play(index: int) -> None:
                name, context = names[index], [*PROMPT, index]
                request = start_request(name, context, sampling=pb.Sampling(max_tokens=5 + index, seed=index))
                # the first step does not wait for the answer to the start
                start = await stream.send(start=request)
                turned = await stream.step(name, 1)
                assert (await stream.events[start].get()).state.phase == "open"
                for step in (2, 3):
                    context += [*turned.tokens, step]
                    turned = await stream.step(name, step, [step])
                    expected = await engine.generate(context, SamplingParams(1.0, 5 + index, index))
                    assert (turned.tokens, turned.logprobs) == (expected.token_ids, expected.logprobs)
                ended = await stream.ask(end=pb.EndEpisodeRequest(episode_id=name, reward=1.0))
                assert (ended.chunk.data, ended.chunk.digest) == await client.end(name)

            await asyncio.gather(*(play(index) for index in range(20)))
            assert (await stream.ask(renew=pb.RenewRequest(episode_ids=names[:2]))).renewed.lost == names[:2]

    asyncio.run(run())


def test_stream_ends_when_the_client_is_done_and_its_turns_have_ended(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, _), connected(client) as stream:
            name = new_id()
            await stream.send(start=start_request(name))
            step = await stream.send(step=pb.StepRequest(episode_id=name, step=1))
            await stream.call.done_writing()
            assert stream.reading is not None
            await asyncio.wait_for(stream.reading, 10)
            assert (await stream.turn(step)).finish == pb.LENGTH
            assert await stream.call.code() is grpc.StatusCode.OK

    asyncio.run(run())


def test_failures_are_events_and_the_stream_goes_on(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        options = {"bounds": Bounds(credits=2)}
        async with held_bridge(policy, tmp_path, 1, **options) as (client, _, engine), connected(client) as stream:
            names = [new_id() for _ in range(3)]
            for name in names:
                await stream.ask(start=start_request(name))
            wrong: list[tuple[dict[str, Any], int, str]] = [
                ({}, 3, "BadMessage"),
                ({"start": start_request("short")}, 3, "BadMessage"),
                ({"start": start_request(names[0], [1])}, 6, "EpisodeConflict"),
                ({"step": pb.StepRequest(episode_id=names[0], step=2)}, 9, "WrongStep"),
                ({"step": pb.StepRequest(episode_id=new_id(), step=1)}, 5, "UnknownEpisode"),
                ({"step": pb.StepRequest(episode_id=names[0], step=1, observation_ids=b"1")}, 3, "BadMessage"),
                ({"cancel": pb.StepName(episode_id=names[0], step=1)}, 9, "WrongStep"),
                ({"end": pb.EndEpisodeRequest(episode_id=new_id())}, 5, "UnknownEpisode"),
            ]
            for what, code, error in wrong:
                event = await stream.ask(**what)
                assert (event.failure.code, event.failure.error) == (code, error) and event.failure.message
            running = [await stream.send(step=pb.StepRequest(episode_id=name, step=1)) for name in names[:2]]
            event = await stream.ask(step=pb.StepRequest(episode_id=names[2], step=1))
            assert (event.failure.code, event.failure.error) == (8, "TooManySteps")
            assert "2 steps run on this stream" in event.failure.message
            assert (await stream.ask(cancel=pb.StepName(episode_id=names[0], step=1))).state.phase == "open"
            assert (await stream.turn(running[0])).finish == pb.CANCELLED
            engine.go_on.set()
            assert (await stream.turn(running[1])).finish == pb.LENGTH
            assert (await stream.step(names[2], 1)).finish == pb.LENGTH, "an end gives its credit back"

    asyncio.run(run())


def test_stream_sees_the_episodes_of_its_key_only(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, keys=(KEY, "o" * 16)) as (client, bridge, _):
            name = new_id()
            async with connected(client) as stream:
                assert (await stream.ask(start=start_request(name))).state.phase == "open"
            async with grpc.aio.insecure_channel(bridge.address) as channel:
                async with connected(Client(channel, "o" * 16)) as stream:
                    event = await stream.ask(step=pb.StepRequest(episode_id=name, step=1))
                    assert (event.failure.code, event.failure.error) == (5, "UnknownEpisode")
                    assert (await stream.ask(renew=pb.RenewRequest(episode_ids=[name]))).renewed.lost == [name]
                async with refused("UNAUTHENTICATED", "AccessDenied"):
                    async for _ in Client(channel).stub.Connect():
                        pass
            gzip = grpc.Compression.Gzip
            async with grpc.aio.insecure_channel(bridge.address, compression=gzip) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await Client(channel, KEY).start(start_request(new_id(), labels={"x": "0" * 4000}))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "it is not even decompressed"

    asyncio.run(run())


class LoadingEngine(DelegatingEngine):
    """The built-in engine, whose version is not told while it loads a policy."""

    def __init__(self, inner: BuiltinEngine) -> None:
        super().__init__(inner)
        self.loaded, self.asked = asyncio.Event(), asyncio.Event()
        self.loaded.set()

    async def version(self) -> str:
        self.asked.set()
        await self.loaded.wait()
        return await super().version()


def test_commands_do_not_wait_for_the_start_of_another_episode(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        engine = LoadingEngine(BuiltinEngine(policy, "v1", threads=1))
        async with bridged(engine, limits_of(policy), tmp_path) as (client, _), connected(client) as stream:
            old, new = new_id(), new_id()
            await stream.ask(start=start_request(old))
            engine.loaded.clear()
            engine.asked.clear()
            start = await stream.send(start=start_request(new))
            step = await stream.send(step=pb.StepRequest(episode_id=new, step=1))
            again = await stream.send(start=start_request(new))
            await engine.asked.wait()
            async with asyncio.timeout(20):
                renewed = await stream.ask(renew=pb.RenewRequest(episode_ids=[old, new]))
                assert not renewed.renewed.lost
                assert (await stream.step(old, 1)).finish == pb.LENGTH
                assert (await stream.ask()).failure.error == "BadMessage"
            assert not any(stream.events[each].qsize() for each in (start, step, again))
            await stream.call.done_writing()
            engine.loaded.set()
            assert (await stream.events[start].get()).state.steps == 0
            assert (await stream.turn(step)).finish == pb.LENGTH
            assert (await stream.events[again].get()).state.steps == 1
            assert stream.reading is not None
            await asyncio.wait_for(stream.reading, 10)
        await engine.close()

    asyncio.run(run())


class FaultyEngine(DelegatingEngine):
    """The built-in engine, which fails in a way of its own when it is asked for its version."""

    fault: BaseException | None = None

    async def version(self) -> str:
        if self.fault is not None:
            raise self.fault
        return await super().version()


@pytest.mark.parametrize(
    ("fault", "code", "name"), [(asyncio.CancelledError(), 14, "EngineStopped"), (OSError("disk"), 13, "BridgeError")]
)
def test_start_is_answered_however_its_engine_fails(
    policy: Path, tmp_path: Path, fault: BaseException, code: int, name: str
) -> None:
    async def run() -> None:
        engine = FaultyEngine(BuiltinEngine(policy, "v1", threads=1))
        async with bridged(engine, limits_of(policy), tmp_path) as (client, _), connected(client) as stream:
            engine.fault = fault
            async with asyncio.timeout(20):
                failure = (await stream.ask(start=start_request(new_id()))).failure
                assert (failure.code, failure.error) == (code, name) and repr(fault) in failure.message
                engine.fault = None
                assert (await stream.ask(start=start_request(new_id()))).state.phase == "open"
        await engine.close()

    asyncio.run(run())


def test_turns_outlive_their_stream(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 3) as (client, bridge, engine):
            name = new_id()
            async with connected(client) as stream:
                await stream.ask(start=start_request(name))
                first = await stream.send(step=pb.StepRequest(episode_id=name, step=1))
                await stream.events[first].get()
            engine.go_on.set()
            async with connected(client) as stream:
                assert len((await stream.step(name, 1)).tokens) == 24
            assert (engine.streams, bridge.sessions.running) == (1, 0)

    asyncio.run(run())


@pytest.mark.slow
def test_client_that_reads_late_gets_everything_in_few_messages(policy: Path, tmp_path: Path) -> None:
    """And the server's memory does not grow with what it has not read."""

    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, bridge, engine):
            stream, names = Stream(client), [new_id() for _ in range(40)]
            for name in names:
                await stream.send(start=start_request(name, sampling=pb.Sampling(max_tokens=200, seed=7)))
            while bridge.sessions.open < len(names):
                await asyncio.sleep(0.01)
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            steps = [await stream.send(step=pb.StepRequest(episode_id=name, step=1)) for name in names]
            while not all([(await client.state(name)).tokens == 204 for name in names]):
                await asyncio.sleep(0.1)
            # asked again and again by a client that does not read
            for name in names:
                for _ in range(10):
                    await stream.send(step=pb.StepRequest(episode_id=name, step=1))
            await asyncio.sleep(0.3)
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert grown < 3_000_000, f"{grown} bytes for 40 turns of 1.6 KB with 11 readers each"
            stream.read()
            expected = await engine.generate(PROMPT, SamplingParams(1.0, 200, 7))
            for identity in range(steps[0], stream.sent + 1):
                turned = await stream.turn(identity)
                assert (turned.tokens, turned.finish) == (expected.token_ids, pb.LENGTH)
            stream.call.cancel()
            await asyncio.gather(stream.reading, return_exceptions=True)  # type: ignore[arg-type]

    asyncio.run(run())


def test_server_stops_reading_commands_of_a_client_that_reads_no_answers(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, _):
            stream, command = Stream(client), {"renew": pb.RenewRequest(episode_ids=["x" * 64] * 100)}
            sent = 0
            while sent < 100_000:
                writing = asyncio.ensure_future(stream.send(**command))
                if not (await asyncio.wait([writing], timeout=1))[0]:
                    break
                sent += 1
            assert sent < 5000, "HTTP/2's windows and a few answers are full by then"
            stream.read()
            await writing
            for identity in range(1, sent + 2):
                assert len((await stream.events[identity].get()).renewed.lost) == 100
            stream.call.cancel()
            await asyncio.gather(stream.reading, return_exceptions=True)  # type: ignore[arg-type]

    asyncio.run(run())


@pytest.mark.slow
def test_random_interleavings_lose_no_token(policy: Path, tmp_path: Path) -> None:
    """Clients that step, repeat, join, cancel, break their stream and reattach see what an undisturbed one would."""

    async def episode(seed: int, client: Client) -> None:
        chance = random.Random(seed)
        name, known, context = new_id(), Turned(), [*PROMPT, seed]
        sampling = pb.Sampling(max_tokens=40, seed=seed)
        start = start_request(name, context, sampling=sampling)
        step, observed, cancelled = 1, [], False
        stream: Stream | None = None
        while step <= 4:
            if stream is None:
                stream = Stream(client)
                stream.read()
                await stream.ask(start=start)  # again and again
            request = pb.StepRequest(
                episode_id=name, step=step, observation_ids=ids(observed), from_token=len(known.tokens)
            )
            identity = await stream.send(step=request)
            action = chance.choice(["read", "read", "break", "cancel", "join"])
            if action == "cancel":
                event = await stream.ask(cancel=pb.StepName(episode_id=name, step=step))
                # too early: the step was not begun
                cancelled = cancelled or event.WhichOneof("what") == "state"
            if action == "join":
                again = await stream.step(name, step, observed)
                assert again.tokens[: len(known.tokens)] == known.tokens
            while known.finish is None:
                event = await stream.events[identity].get()
                assert event.WhichOneof("what") == "step", event
                known.add(event.step)
                if action == "break" and chance.random() < 0.5:
                    stream.call.cancel()
                    stream = None
                    break
            if known.finish is None:
                continue
            replay = await client.step(name, step, observed)
            assert vars(replay) == vars(known)
            assert known.finish in ((pb.CANCELLED, pb.LENGTH) if cancelled else (pb.LENGTH,))
            truth.append(([*context, *observed], known.tokens, seed))
            context += observed + known.tokens
            step, observed, cancelled, known = step + 1, [chance.randrange(96) for _ in range(step)], False, Turned()
        data, digest = await client.end(name)
        assert (await client.end(name)) == (data, digest)
        if stream is not None:
            stream.call.cancel()

    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, journal=tmp_path / "journal") as (client, bridge, engine):
            await asyncio.gather(*(episode(seed, client) for seed in range(16)))
            assert (bridge.sessions.open, bridge.sessions.running) == (0, 0)
            for prompt, tokens, seed in truth:
                expected = await engine.generate(prompt, SamplingParams(1.0, 40, seed))
                assert expected.token_ids[: len(tokens)] == tokens

    truth: list[tuple[list[int], list[int], int]] = []
    asyncio.run(run())
    assert len(truth) == 64
