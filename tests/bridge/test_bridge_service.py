"""Calls of the bridge, with the real built-in engine over a Unix socket: what each promises, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest

from contracts.episodes import EPISODES, SEQUENCES, Outcome, TokenRole, read_episodes
from contracts.pb import bridge_pb2 as pb
from inference.bridge.registry import Bounds
from inference.bridge.serve import limits_of
from inference.engines.base import Piece, SamplingParams
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
    tokens_of,
)
from tests.inference.conftest import write_checkpoint


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0)


@pytest.fixture(scope="module")
def long_policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with room for turns that are long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("policies")
    return [write_checkpoint(folder / f"p{seed}", seed, max_position_embeddings=4096) for seed in (0, 1)]


def tables_of(data: bytes) -> tuple[pa.Table, pa.Table]:
    stream = io.BytesIO(data)
    return pa.ipc.open_stream(stream).read_all(), pa.ipc.open_stream(stream).read_all()


def test_steps_are_what_the_engine_samples_and_replays_are_equal(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, engine):
            episode = new_id()
            state = await client.start(start_request(episode))
            assert (state.phase, state.steps, state.tokens, state.version) == ("open", 0, 4, "v1")
            context = list(PROMPT)
            for step, observed in ((1, []), (2, [9, 10, 11]), (3, [])):
                context += observed
                expected = await engine.generate(context, SamplingParams(1.0, 24, 7))
                turned = await client.step(episode, step, observed)
                assert (turned.tokens, turned.logprobs) == (expected.token_ids, expected.logprobs)
                assert (turned.finish, turned.spans) == (pb.LENGTH, [("v1", 0, 24)])
                again = await client.step(episode, step, observed)
                assert vars(again) == vars(turned)
                context += turned.tokens
            rest = [event async for event in client.step_call(episode, 3, from_token=20)]
            assert tokens_of(rest[0].tokens.ids) == context[-4:] and rest[0].tokens.first == 20
            rest = [event async for event in client.step_call(episode, 3, from_token=24)]
            assert [(event.HasField("tokens"), event.HasField("end")) for event in rest] == [(False, True)]

    asyncio.run(run())


def test_sampling_of_a_step_is_for_that_step_alone(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode))
            greedy = await engine.generate(PROMPT, SamplingParams(0.0, 5, 0))
            stop = greedy.token_ids[3]
            sampling = pb.Sampling(temperature=0, max_tokens=9, stop_token_ids=[stop])
            turned = await client.step(episode, 1, sampling=sampling)
            expected = await engine.generate(PROMPT, SamplingParams(0.0, 9, 0, (stop,)))
            assert (turned.tokens, turned.finish) == (expected.token_ids, pb.STOP)
            second = await client.step(episode, 2, [4])
            assert len(second.tokens) == 24
            async with refused("FAILED_PRECONDITION", "WrongStep", "other sampling"):
                await client.step(episode, 2, [4], sampling=sampling)

    asyncio.run(run())


def test_turn_without_bound_ends_with_the_context(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, _):
            episode = new_id()
            await client.start(start_request(episode, sampling=pb.Sampling(seed=1)))
            turned = await client.step(episode, 1)
            assert (turned.finish, len(turned.tokens)) == (pb.CONTEXT, 252)
            async with refused("INVALID_ARGUMENT", "RequestTooLong", "257 tokens, the policy's holds 256"):
                await client.step(episode, 2, [1])
            assert (await client.state(episode)).steps == 1

    asyncio.run(run())


def test_bad_messages_are_refused_by_name_and_lose_nothing(policy: Path, tmp_path: Path) -> None:
    bad_starts: list[tuple[dict[str, Any], str, str]] = [
        ({"episode_id": "short"}, "BadMessage", "16 to 64 characters"),
        ({"episode_id": "a" * 65}, "BadMessage", "16 to 64 characters"),
        ({"episode_id": "a" * 15 + "/"}, "BadMessage", "16 to 64 characters"),
        ({"group_id": "no spaces"}, "BadMessage", "group_id"),
        ({"prompt_ids": b""}, "BadMessage", "prompt_ids is empty"),
        ({"prompt_ids": b"12345"}, "BadMessage", "5 bytes"),
        ({"prompt_ids": ids([5, 96])}, "BadMessage", "token 96, the policy's are in [0, 96)"),
        ({"prompt_ids": ids([5, -1])}, "BadMessage", "token -1"),
        ({"prompt_ids": ids([5] * 256)}, "RequestTooLong", "256 tokens"),
        ({"rule": 7}, "BadMessage", "rule=7"),
        ({"lease_s": math.nan}, "BadMessage", "lease_s=nan"),
        ({"labels": {"k": "v" * 5000}}, "BadMessage", "labels have 5001 characters"),
        ({"sampling": pb.Sampling(temperature=-0.1)}, "BadMessage", "sampling.temperature=-0.1"),
        ({"sampling": pb.Sampling(temperature=1e-40)}, "BadMessage", "sampling.temperature=9.99995e-41"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "BadMessage", "sampling.temperature=nan"),
        ({"sampling": pb.Sampling(temperature=math.inf)}, "BadMessage", "sampling.temperature=inf"),
        ({"sampling": pb.Sampling(max_tokens=-1)}, "BadMessage", "sampling.max_tokens=-1"),
        ({"sampling": pb.Sampling(stop_token_ids=[96])}, "BadMessage", "sampling.stop_token_ids"),
        ({"sampling": pb.Sampling(stop_token_ids=range(65))}, "BadMessage", "65 tokens"),
    ]
    bad_steps: list[tuple[dict[str, Any], str, str]] = [
        ({"observation_ids": b"123"}, "BadMessage", "3 bytes"),
        ({"observation_ids": ids([96])}, "BadMessage", "token 96"),
        ({"observation_ids": ids([1] * 250)}, "RequestTooLong", "shorten it, or end"),
        ({"from_token": -1}, "BadMessage", "from_token=-1"),
        ({"from_token": 1}, "BadMessage", "from_token=1"),
        ({"turn_s": -1.0}, "BadMessage", "turn_s=-1.0"),
        (
            {"sampling": pb.Sampling(temperature=-1)},
            "BadMessage",
            "temperature=-1: must be from 0.001 to 1000",
        ),
    ]

    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, bridge, _):
            for changes, name, words in bad_starts:
                request = start_request(new_id())
                for field, value in changes.items():
                    if field in ("labels", "sampling"):
                        request.ClearField(field)
                    request.MergeFrom(pb.StartEpisodeRequest(**{field: value}))
                    if value == b"":
                        request.prompt_ids = b""
                async with refused("INVALID_ARGUMENT", name, words):
                    await client.start(request)
            assert bridge.sessions.open == 0
            episode = new_id()
            await client.start(start_request(episode))
            before = await client.step(episode, 1)
            for changes, name, words in bad_steps:
                call = client.stub.Step(pb.StepRequest(episode_id=episode, step=2, **changes))
                async with refused("INVALID_ARGUMENT", name, words):
                    await call.read()
            state = await client.state(episode)
            assert (state.phase, state.steps, state.tokens) == ("open", 1, 4 + len(before.tokens))
            async with refused("INVALID_ARGUMENT", "BadMessage", "from_token=25"):
                await client.step_call(episode, 1, from_token=25).read()
            async with refused("INVALID_ARGUMENT", "BadMessage", "reward=nan"):
                await client.end(episode, reward=math.nan)
            async with refused("INVALID_ARGUMENT", "BadMessage", "components"):
                await client.end(episode, components={"a": math.inf})
            assert (await client.step(episode, 2, [3])).finish == pb.LENGTH

    asyncio.run(run())


def test_bytes_that_are_no_message_are_refused_by_name(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, keys=[KEY]) as (client, bridge, _):
            async with grpc.aio.insecure_channel(bridge.address) as channel:
                service, rubbish = "/triplane.bridge.v1.Bridge/", b"\xff" * 9
                async with refused("INVALID_ARGUMENT", "BadMessage", "no message of this method"):
                    await channel.unary_unary(service + "StartEpisode")(rubbish, metadata=client.metadata)
                async with refused("INVALID_ARGUMENT", "BadMessage", "no message of this method"):
                    async for _ in channel.unary_stream(service + "Step")(rubbish, metadata=client.metadata):
                        pass
                stream = channel.stream_stream(service + "Connect")(metadata=client.metadata)
                await stream.write(rubbish)
                renew = pb.Command(id=3, renew=pb.RenewRequest(episode_ids=["x"]))
                await stream.write(renew.SerializeToString())
                events = [pb.Event.FromString(await stream.read()) for _ in range(3)]
                assert events[0].credits and (events[1].failure.code, events[1].failure.error) == (3, "BadMessage")
                assert (events[2].id, list(events[2].renewed.lost)) == (3, ["x"])

    asyncio.run(run())


def test_wrong_steps_name_the_step_expected(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 3) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode))
            for step in (0, 2, -1):
                async with refused("FAILED_PRECONDITION", "WrongStep", "expects step 1, not"):
                    await client.step(episode, step)
            async with refused("INVALID_ARGUMENT", "BadMessage", "observation_ids of step 1 must be empty"):
                await client.step(episode, 1, [5])
            async with refused("FAILED_PRECONDITION", "WrongStep", "0 is its last one"):
                await client.cancel(episode, 0)
            running = client.step_call(episode, 1)
            await running.read()
            async with refused("FAILED_PRECONDITION", "WrongStep", "step 1 again with the same content, which has not"):
                await client.step(episode, 2, [5])
            async with refused("FAILED_PRECONDITION", "WrongStep", "other sampling"):
                await client.step(episode, 1, sampling=pb.Sampling(max_tokens=1))
            engine.go_on.set()
            await client.step(episode, 1)
            await client.step(episode, 2, [5])
            async with refused("FAILED_PRECONDITION", "WrongStep", "other observation_ids"):
                await client.step(episode, 2, [6])
            async with refused("FAILED_PRECONDITION", "WrongStep", "expects step 3, or 2 again"):
                await client.step(episode, 1)
            assert engine.streams == 2

    asyncio.run(run())


def test_repeated_start_gives_the_state_of_now_and_other_content_conflicts(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, bridge, _):
            request = start_request(new_id(), labels={"a": "1", "b": "2"})
            states = await asyncio.gather(*(client.start(request) for _ in range(8)))
            assert {state.digest for state in states} == {states[0].digest} and bridge.sessions.open == 1
            await client.step(request.episode_id, 1)
            assert (await client.start(request)).steps == 1
            request.sampling.seed += 1
            async with refused("ALREADY_EXISTS", "EpisodeConflict", "draw a new id"):
                await client.start(request)
            async with refused("FAILED_PRECONDITION", "StaleVersion", "version v9 is asked for, but v1 is served"):
                await client.start(start_request(new_id(), version="v9"))

    asyncio.run(run())


def test_keys_see_their_own_episodes_only(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, keys=(KEY, "o" * 16)) as (client, bridge, _):
            episode = new_id()
            await client.start(start_request(episode))
            await client.step(episode, 1)
            async with grpc.aio.insecure_channel(bridge.address) as channel:
                other, nobody = Client(channel, "o" * 16), Client(channel)
                unknown = new_id()
                for name in (episode, unknown):
                    for call in (
                        lambda name=name: other.step(name, 1),
                        lambda name=name: other.state(name),
                        lambda name=name: other.cancel(name, 1),
                        lambda name=name: other.end(name),
                    ):
                        async with refused("NOT_FOUND", "UnknownEpisode", f"episode {name} is unknown to this key"):
                            await call()
                    assert await other.renew(name) == [name]
                # an id that another key uses is free
                state = await other.start(start_request(episode, [1, 2, 3]))
                assert (state.steps, state.tokens) == (0, 3)
                async with refused("UNAUTHENTICATED", "AccessDenied", "asks for a key"):
                    await nobody.state(episode)
                async with refused("UNAUTHENTICATED", "AccessDenied"):
                    await nobody.step(episode, 1)
            assert (await client.state(episode)).steps == 1

    asyncio.run(run())


def test_lost_connection_cancels_no_turn_and_readers_join_it(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 5) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode))
            first = client.step_call(episode, 1)
            got = tokens_of((await first.read()).tokens.ids)
            async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'b.sock'}") as channel:
                lost = Client(channel).step_call(episode, 1)
                await lost.read()
            first.cancel()
            joined = asyncio.create_task(client.step(episode, 1))
            resumed = client.step_call(episode, 1, from_token=len(got))
            await asyncio.sleep(0.05)
            assert (await client.state(episode)).phase == "stepping"
            engine.go_on.set()
            whole = await joined
            expected = await engine.generate(PROMPT, SamplingParams(1.0, 24, 7))
            assert (whole.tokens, engine.streams) == (expected.token_ids, 1)
            rest = Turned()
            rest.tokens, rest.logprobs, rest.spans = list(got), whole.logprobs[: len(got)], [("v1", 0, len(got))]
            async for event in resumed:
                rest.add(event)
            assert vars(rest) == vars(whole)

    asyncio.run(run())


def test_steps_of_an_episode_are_bounded(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.bridge.sessions.MOST_TURNS", 3)

    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, _):
            episode = new_id()
            await client.start(start_request(episode))
            for step in (1, 2, 3):
                assert (await client.step(episode, step, turn_s=1e-9)).finish == pb.DEADLINE
            async with refused("INVALID_ARGUMENT", "BadMessage", "has 3 steps, as many as one may: end it"):
                await client.step(episode, 4)
            assert (await client.step(episode, 3)).finish == pb.DEADLINE, "it may still be asked for"
            await client.end(episode)

    asyncio.run(run())


def test_step_calls_of_one_key_are_bounded(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 1, bounds=Bounds(credits=3)) as (client, _, engine):
            name = new_id()
            await client.start(start_request(name))
            calls = [client.step_call(name, 1) for _ in range(3)]
            for call in calls:
                await anext(aiter(call))
            async with refused("RESOURCE_EXHAUSTED", "TooManySteps", "3 Step calls of this key are open"):
                await client.step(name, 1)
            calls[0].cancel()
            engine.go_on.set()
            for call in calls[1:]:
                async for _ in call:
                    pass
            assert (await client.step(name, 1)).finish == pb.LENGTH

    asyncio.run(run())


def test_cancelled_step_keeps_its_tokens_and_the_episode_goes_on(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 5) as (client, bridge, engine):
            episode = new_id()
            await client.start(start_request(episode))
            turned, call = Turned(), client.step_call(episode, 1)
            while len(turned.tokens) < 5:
                turned.add(await anext(aiter(call)))
            state = await client.cancel(episode, 1)
            assert (state.phase, state.tokens, bridge.sessions.running) == ("open", 9, 0)
            async for event in call:
                turned.add(event)
            assert (turned.finish, len(turned.tokens)) == (pb.CANCELLED, 5)
            assert (await client.cancel(episode, 1)).tokens == 9
            assert vars(await client.step(episode, 1)) == vars(turned)
            engine.go_on.set()
            second = await client.step(episode, 2, [8])
            expected = await engine.generate([*PROMPT, *turned.tokens, 8], SamplingParams(1.0, 24, 7))
            assert second.tokens == expected.token_ids

    asyncio.run(run())


def test_turn_ends_at_its_deadline_and_outlives_that_of_the_call(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 5) as (client, _, _):
            for factor in (1, 5, 25):  # a busy machine may need longer for five tokens
                episode = new_id()
                await client.start(start_request(episode))
                call = client.stub.Step(
                    pb.StepRequest(episode_id=episode, step=1, turn_s=0.6 * factor), timeout=0.2 * factor
                )
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call:
                        pass
                assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if (await client.state(episode)).phase != "stepping":
                    continue
                turned = await client.step(episode, 1)
                assert turned.finish == pb.DEADLINE
                if len(turned.tokens) == 5:
                    return
            pytest.fail("a turn ended with its call, or without its tokens")

    asyncio.run(run())


def test_pinned_turn_ends_stale_with_the_tokens_made_before(long_policies: list[Path], tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(long_policies[0], tmp_path) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode, sampling=pb.Sampling(seed=7)))
            turned, call = Turned(), client.step_call(episode, 1)
            turned.add(await anext(aiter(call)))
            await engine.load_weights(long_policies[1], "v2")
            async for event in call:
                turned.add(event)
            count = len(turned.tokens)
            assert turned.finish == pb.STALE and 0 < count < 4000
            assert turned.spans == [("v1", 0, count)]
            old = BuiltinEngine(long_policies[0], "v1", threads=1)
            assert (await old.generate(PROMPT, SamplingParams(1.0, count, 7))).token_ids == turned.tokens
            await old.close()
            state = await client.state(episode)
            assert (state.phase, state.tokens) == ("open", 4 + count)
            second = await client.step(episode, 2, [3])
            assert (second.finish, second.tokens) == (pb.STALE, [])

    asyncio.run(run())


def test_following_turn_says_which_version_made_its_tokens(long_policies: list[Path], tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(long_policies[0], tmp_path) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode, rule=pb.FOLLOW, sampling=pb.Sampling(seed=7)))
            turned, call = Turned(), client.step_call(episode, 1)
            turned.add(await anext(aiter(call)))
            await engine.load_weights(long_policies[1], "v2")
            while turned.spans[-1][0] == "v1":
                turned.add(await anext(aiter(call)))
            await client.cancel(episode, 1)
            async for event in call:
                turned.add(event)
            assert turned.finish == pb.CANCELLED and [version for version, _, _ in turned.spans] == ["v1", "v2"]
            short = pb.Sampling(max_tokens=3, seed=7)
            assert (await client.step(episode, 2, [3], sampling=short)).spans == [("v2", 0, 3)]
            assert list((await client.stub.Info(pb.InfoRequest())).versions) == ["v2"]
            (found,) = read_episodes(*tables_of((await client.end(episode))[0]))
            assert [version for version, _, _ in found.sequences[0].policy_spans] == ["v1", "v2", "v2"]

    asyncio.run(run())


def test_dead_engine_ends_turns_as_lost_and_their_tokens_stay(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, engine):
            episode = new_id()
            await client.start(start_request(episode, sampling=pb.Sampling(max_tokens=240, seed=7)))
            turned, call = Turned(), client.step_call(episode, 1)
            turned.add(await anext(aiter(call)))
            engine._scheduler.step = lambda: 1 / 0  # type: ignore[method-assign, return-value, assignment]
            async for event in call:
                turned.add(event)
            assert turned.finish == pb.ENGINE_LOST and turned.tokens
            second = await client.step(episode, 2, [3])
            assert (second.finish, second.tokens) == (pb.ENGINE_LOST, [])
            assert (await client.state(episode)).phase == "open"

    asyncio.run(run())


class CancelledEngine(DelegatingEngine):
    """Its streams raise CancelledError after their first piece, as calls of a closed gRPC channel do."""

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        async with contextlib.aclosing(self.inner.stream(prompt_ids, params)) as pieces:
            yield await anext(pieces)
            raise asyncio.CancelledError


def test_turn_whose_engine_raises_cancelled_error_ends_as_lost(long_policies: list[Path], tmp_path: Path) -> None:
    async def run() -> None:
        engine = CancelledEngine(BuiltinEngine(long_policies[0], "v1", threads=1))
        async with bridged(engine, limits_of(long_policies[0]), tmp_path) as (client, bridge):
            episode = new_id()
            await client.start(start_request(episode, sampling=pb.Sampling(max_tokens=2000, seed=7)))
            async with asyncio.timeout(20):
                turned = await client.step(episode, 1)
            assert turned.finish == pb.ENGINE_LOST and turned.tokens and not bridge.sessions.running
        await engine.close()

    asyncio.run(run())


class WrongEngine(DelegatingEngine):
    """Its streams have a piece that `change` makes of the second one."""

    def __init__(self, inner: BuiltinEngine, change: Callable[[Piece], Piece]) -> None:
        super().__init__(inner)
        self._change = change

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        async with contextlib.aclosing(self.inner.stream(prompt_ids, params)) as pieces:
            yield await anext(pieces)
            yield self._change(await anext(pieces))
            await asyncio.Future()


@pytest.mark.parametrize(
    "change",
    [
        lambda piece: replace(piece, logprobs=piece.logprobs * np.float32("nan")),
        lambda piece: replace(piece, logprobs=-piece.logprobs),
        lambda piece: replace(piece, token_ids=piece.token_ids + 10**6),
        lambda piece: replace(piece, spans=[("v1", 0, len(piece.token_ids) - 1)]),
        lambda piece: Piece(piece.token_ids.repeat(3000), piece.logprobs.repeat(3000), [("v1", 0, 3000)]),
        lambda piece: replace(piece, finish_reason="stop"),
    ],
    ids=["nan", "positive", "foreign", "spans", "long", "stop"],
)
def test_turn_whose_engine_returns_what_no_policy_samples_ends_as_lost(
    long_policies: list[Path], tmp_path: Path, change: Callable[[Piece], Piece]
) -> None:
    async def run() -> None:
        engine = WrongEngine(BuiltinEngine(long_policies[0], "v1", threads=1), change)
        async with bridged(engine, limits_of(long_policies[0]), tmp_path) as (client, _):
            episode = new_id()
            await client.start(start_request(episode, sampling=pb.Sampling(max_tokens=2000, seed=7)))
            async with asyncio.timeout(20):
                turned = await client.step(episode, 1)
            assert turned.finish == pb.ENGINE_LOST and 0 < len(turned.tokens) < 2000
            assert max(turned.tokens) < 10**6 and all(logprob <= 0 for logprob in turned.logprobs)
        await engine.close()

    asyncio.run(run())


def test_record_is_a_row_of_episodes_and_sequences(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, bridge, _):
            episode = new_id()
            labels = {"task_id": "task-1", "other": "x"}
            await client.start(
                start_request(episode, group_id="g1", labels=labels, sampling=pb.Sampling(max_tokens=6, seed=2**64 - 1))
            )
            turns = [await client.step(episode, 1), await client.step(episode, 2, [9, 10])]
            digest = (await client.state(episode)).digest
            data, said = await client.end(episode, reward=0.5, components={"tests": 1.0})
            again = await client.end(episode, reward=0.9)
            assert again == (data, said), "what the first call said stays"
            assert hashlib.sha256(data).hexdigest() == said
            episodes, sequences = tables_of(data)
            assert episodes.schema.equals(EPISODES) and sequences.schema.equals(SEQUENCES)
            (found,) = read_episodes(episodes, sequences)
            assert (found.episode_id, found.group_id, found.task_id, found.seed) == (episode, "g1", "task-1", -1)
            assert (found.policy_version, found.turns, found.outcome) == ("v1", 2, Outcome.TRUNCATED)
            (sequence,) = found.sequences
            tokens = [*PROMPT, *turns[0].tokens, 9, 10, *turns[1].tokens]
            assert sequence.token_ids == tokens
            assert hashlib.sha256(ids(tokens)).hexdigest() == digest
            turn = [TokenRole.POLICY] * 6
            roles = [TokenRole.PROMPT] * 4 + turn + [TokenRole.ENVIRONMENT] * 2 + turn
            assert sequence.token_role == roles
            made = [value for value in sequence.logprobs if value is not None]
            assert np.array(made, np.float32).tolist() == turns[0].logprobs + turns[1].logprobs
            assert [value is None for value in sequence.logprobs] == [role != TokenRole.POLICY for role in roles]
            assert sequence.policy_spans == [("v1", 4, 10), ("v1", 12, 18)]
            about = json.loads(episodes.schema.metadata[b"triplane.bridge"])
            assert about == {
                "aborted": False,
                "components": {"tests": 1.0},
                "labels": labels,
                "reward": 0.5,
                "rule": "PINNED",
            }
            state = await client.state(episode)
            assert (state.phase, bridge.sessions.open) == ("ended", 0)
            async with refused("FAILED_PRECONDITION", "EpisodeEnded"):
                await client.step(episode, 3)
            assert await client.renew(episode) == [episode]

    asyncio.run(run())


def test_ending_a_stepping_episode_cancels_its_turn(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 5) as (client, bridge, _):
            episode = new_id()
            await client.start(start_request(episode))
            call = client.step_call(episode, 1)
            turned = Turned()
            while len(turned.tokens) < 5:
                turned.add(await anext(aiter(call)))
            data, _ = await client.end(episode, aborted=True)
            async for event in call:
                turned.add(event)
            assert turned.finish == pb.CANCELLED and bridge.sessions.running == 0
            (found,) = read_episodes(*tables_of(data))
            assert found.outcome == Outcome.ABORTED and found.sequences[0].token_ids == [*PROMPT, *turned.tokens]
            unplayed = new_id()
            await client.start(start_request(unplayed))
            (found,) = read_episodes(*tables_of((await client.end(unplayed))[0]))
            assert (found.turns, found.sequences[0].token_ids) == (0, PROMPT)

    asyncio.run(run())


def test_leases_end_unless_something_is_asked_or_waited_for(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with held_bridge(policy, tmp_path, 2, bounds=Bounds(lease_s=1.2)) as (client, bridge, engine):
            names = [new_id() for _ in range(4)]
            idle, renewed, waited, detached = names
            for name in names:
                state = await client.start(start_request(name))
            assert 0 < state.expires_unix - time.time() <= 1.2
            waiting = asyncio.create_task(client.step(waited, 1))
            leaving = client.step_call(detached, 1)
            await leaving.read()
            leaving.cancel()
            for _ in range(10):
                await asyncio.sleep(0.25)
                assert await client.renew(renewed) == []
            assert (await client.state(idle)).phase == "expired"
            async with refused("NOT_FOUND", "EpisodeExpired", "the lease of episode"):
                await client.step(idle, 1)
            async with refused("NOT_FOUND", "EpisodeExpired"):
                await client.end(idle)
            assert (await client.state(detached)).phase == "expired"
            assert set(await client.renew(*names)) == {idle, detached}
            assert (bridge.sessions.open, bridge.sessions.running) == (2, 1)
            engine.go_on.set()
            assert (await waiting).finish == pb.LENGTH
            assert (await client.start(start_request(idle))).phase == "expired", "a start says so too"

    asyncio.run(run())


def test_leases_end_after_a_sweep_that_failed(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, bounds=Bounds(lease_s=0.2)) as (client, bridge, _):
            sweep, failures = bridge.sessions.sweep, [KeyError(7)]

            def failing() -> None:
                if failures:
                    raise failures.pop()
                sweep()

            monkeypatch.setattr(bridge.sessions, "sweep", failing)
            await client.start(start_request(new_id()))
            deadline = time.monotonic() + 20
            while bridge.sessions.open and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            assert bridge.sessions.open == 0 and not failures

    asyncio.run(run())
    assert "KeyError: 7" in caplog.text


@pytest.mark.parametrize("durable", [False, True])
def test_draining_bridge_starts_nothing_and_lets_turns_end(policy: Path, tmp_path: Path, durable: bool) -> None:
    async def run() -> None:
        journal = tmp_path / "journal" if durable else None
        async with held_bridge(policy, tmp_path, 5, journal=journal) as (client, bridge, engine):
            name = new_id()
            await client.start(start_request(name))
            call = client.step_call(name, 1)
            await anext(aiter(call))
            bridge.sessions.draining = True
            async with refused("UNAVAILABLE", "Draining", "use another one"):
                await client.start(start_request(new_id()))
            assert (await client.start(start_request(name))).steps == 1, "it was started before"
            engine.go_on.set()
            assert (await client.step(name, 1)).finish == pb.LENGTH
            if durable:
                async with refused("UNAVAILABLE", "Draining", "its successor has this episode"):
                    await client.step(name, 2, [3])
            else:
                assert (await client.step(name, 2, [3])).finish == pb.LENGTH
            await client.end(name)

    asyncio.run(run())


def test_starts_beyond_the_bound_are_refused_and_cost_no_memory(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path, bounds=Bounds(max_episodes=3)) as (client, bridge, _):
            names = [new_id() for _ in range(3)]
            for name in names:
                await client.start(start_request(name))

            async def refuse() -> None:
                async with refused("RESOURCE_EXHAUSTED", "TooManyEpisodes", "3 episodes are open"):
                    await client.start(start_request(new_id()))

            for _ in range(4):
                await asyncio.gather(*(refuse() for _ in range(100)))
            assert len(bridge.sessions._episodes) == 3
            await client.end(names[0])
            await client.start(start_request(new_id()))
            # closed episodes are bounded, too
            for _ in range(5):
                name = new_id()
                await client.end(names[1])
                names[1] = name
                await client.start(start_request(name))
            bridge.sessions.sweep()
            assert len(bridge.sessions._episodes) <= 6

    asyncio.run(run())


def test_scores_are_the_logprobs_of_sampling(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with builtin_bridge(policy, tmp_path) as (client, _, engine):
            completion = await engine.generate(PROMPT, SamplingParams(0.8, 12, 3))
            request = pb.ScoreRequest(ids=ids(PROMPT + completion.token_ids), temperature=0.8)
            reply = await client.stub.Score(request)
            assert np.frombuffer(reply.logprobs, "<f4").tolist()[4:] == completion.logprobs and reply.version == "v1"
            bad = [
                (pb.ScoreRequest(ids=b"123"), "BadMessage"),
                (pb.ScoreRequest(), "BadMessage"),
                (pb.ScoreRequest(ids=ids([96])), "BadMessage"),
                (pb.ScoreRequest(ids=ids([1]), temperature=0), "BadMessage"),
                (pb.ScoreRequest(ids=ids([1]), temperature=math.nan), "BadMessage"),
                (pb.ScoreRequest(ids=ids([1] * 257)), "RequestTooLong"),
            ]
            for wrong, name in bad:
                async with refused("INVALID_ARGUMENT", name):
                    await client.stub.Score(wrong)
            async with refused("FAILED_PRECONDITION", "StaleVersion"):
                await client.stub.Score(pb.ScoreRequest(ids=ids([1]), version="v0"))

    asyncio.run(run())
