"""The client against the real bridge with the built-in engine: episodes, cuts, restarts, cancellation, leases."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.bridge_proxy import Proxy
from contracts.rpc.listening import Listening
from inference.bridge.checks import Limits
from inference.bridge.client import (
    AccessDenied,
    Bridge,
    BridgeClient,
    BridgeError,
    Episode,
    Finish,
    Sampling,
    Span,
    TokensChanged,
    Turn,
)
from inference.bridge.errors import BadMessage, EpisodeEnded, UnknownEpisode
from inference.bridge.registry import Bounds
from inference.bridge.serve import Options, limits_of, serving
from inference.engines.builtin import BuiltinEngine
from tests.bridge.bridge_harness import KEY, HeldEngine, bridged, builtin_bridge, held_bridge, process
from tests.bridge.scripted_bridge import looped
from tests.inference.conftest import write_checkpoint

PROMPT = np.array([5, 6, 7, 8], np.int32)
SAMPLING = Sampling(max_tokens=24, seed=7)
Transcript = tuple[bytes, bytes]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0)


def new_id() -> str:
    return secrets.token_hex(16)


async def play(client: BridgeClient, number: int, turns: int = 3) -> Transcript:
    """An episode whose environment answers with the sum of the policy's tokens: its ids and logprobs."""
    episode = await client.start([5, 6, number], sampling=Sampling(max_tokens=16, seed=number))
    seen: list[int] = []
    for _ in range(turns):
        turn = await episode.step(seen)
        seen = [int(turn.token_ids.sum()) % 96]
    await episode.check()
    transcript = episode.context().tobytes(), b"".join(turn.logprobs.tobytes() for turn in episode.turns)
    await episode.end(reward=float(number))
    return transcript


@looped
async def test_episode_and_its_record(policy: Path, tmp_path: Path) -> None:
    async with builtin_bridge(policy, tmp_path) as (_, server, _), BridgeClient(server.address) as bridge:
        episode = await bridge.start(PROMPT, sampling=SAMPLING, group_id="g", labels={"task_id": "t"})
        first = await episode.step()
        assert (first.step, len(first.token_ids), first.finish) == (1, 24, Finish.LENGTH)
        assert first.token_ids.dtype == np.int32 and first.logprobs.dtype == np.float32
        assert first.spans == (Span("v1", 0, 24),)
        pieces = [piece async for piece in episode.stream_step([1, 2], sampling=Sampling(temperature=0, max_tokens=9))]
        second = episode.turns[-1]
        assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == second.token_ids.tolist()
        assert [piece.first for piece in pieces] == np.cumsum([0, *(len(p.token_ids) for p in pieces[:-1])]).tolist()
        assert second.observation_ids.tolist() == [1, 2] and len(second.token_ids) == 9
        context = episode.context()
        score = await bridge.score(context)
        assert score.version == "v1"
        assert np.array_equal(score.logprobs[4:28], first.logprobs)
        record = await episode.end(reward=0.5, components={"tests": 0.5})
        stream = pa.BufferReader(record.data)
        row = pa.ipc.open_stream(stream).read_all().to_pylist()[0]
        sequence = pa.ipc.open_stream(stream).read_all().to_pylist()[0]
        assert row["episode_id"] == episode.id and row["task_id"] == "t" and row["policy_tokens"] == 33
        assert sequence["token_ids"] == context.tolist()
        assert (await episode.end()).digest == record.digest
        with pytest.raises(EpisodeEnded):
            await episode.step()


@looped
async def test_errors_have_the_servers_name(policy: Path, tmp_path: Path) -> None:
    async with builtin_bridge(policy, tmp_path) as (_, server, _), BridgeClient(server.address) as bridge:
        with pytest.raises(BadMessage, match="prompt_ids has token 96"):
            await bridge.start([96])
        with pytest.raises(BadMessage, match="prompt_ids has 4294967297: token ids are int32"):
            await bridge.start(np.array([1 << 32 | 1]))
        with pytest.raises(BadMessage, match="one-dimensional"):
            await bridge.start(np.zeros((2, 2), np.int32))
        with pytest.raises(UnknownEpisode):
            await bridge.attach(new_id(), PROMPT)
        episode = await bridge.start(PROMPT, sampling=SAMPLING)
        with pytest.raises(BadMessage, match="observation_ids of step 1"):
            await episode.step([1])
        assert len((await episode.step()).token_ids) == 24  # a refused step has not begun
        again = BridgeClient(server.address)
        async with again:
            with pytest.raises(BridgeError, match="already"):
                await again.start(PROMPT, sampling=SAMPLING, episode_id=episode.id)


@looped
async def test_key_is_sent_and_missed(policy: Path, tmp_path: Path) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    async with bridged(engine, limits_of(policy), tmp_path, keys=[KEY]) as (_, server):
        async with BridgeClient(server.address, key=KEY) as bridge:
            assert (await bridge.info()).versions == ("v1",)
            await (await bridge.start(PROMPT, sampling=SAMPLING)).step()
        async with BridgeClient(server.address, key="no") as bridge:
            with pytest.raises(AccessDenied, match="asks for a key"):
                await bridge.start(PROMPT)
            with pytest.raises(AccessDenied):
                await bridge.info()
    await engine.close()


@pytest.mark.slow
@looped
async def test_hundreds_of_episodes_through_cut_connections(policy: Path, tmp_path: Path) -> None:
    async with builtin_bridge(policy, tmp_path) as (_, server, _):
        async with BridgeClient(server.address) as bridge:
            undisturbed = await asyncio.gather(*(play(bridge, number) for number in range(64)))
        target = Path(server.address.removeprefix("unix:"))
        async with Proxy(tmp_path / "p.sock", target) as proxy, BridgeClient(proxy.address) as bridge:
            cutting = asyncio.create_task(_cut(proxy))
            disturbed = await asyncio.gather(*(play(bridge, number) for number in range(64)))
            cutting.cancel()
            assert proxy.accepted > 5
        assert disturbed == undisturbed
        assert server.sessions.open == 0 and server.sessions.running == 0


async def _cut(proxy: Proxy) -> None:
    while True:
        await asyncio.sleep(0.03)
        proxy.cut()


@looped
async def test_bridge_is_restarted_under_open_turns(policy: Path, tmp_path: Path) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    socket = Listening(f"unix:{tmp_path / 'b.sock'}")
    options = Options(socket, journal=tmp_path / "journal")
    async with BridgeClient(socket.address) as bridge:
        async with serving(engine, limits_of(policy), options):
            undisturbed = [await play(bridge, number) for number in range(8)]
        held = HeldEngine(engine, hold_after=5)
        async with serving(held, limits_of(policy), options) as server:
            playing = [asyncio.create_task(play(bridge, number)) for number in range(8)]
            while server.sessions.running < 8 or any(len(each.logprobs) < 20 for each in open_of(server)):
                await asyncio.sleep(0.01)
        async with serving(engine, limits_of(policy), options) as server:
            assert await asyncio.gather(*playing) == undisturbed
            assert server.sessions.open == 0
    await engine.close()


@looped
@pytest.mark.slow
async def test_killed_bridge_is_started_again_under_open_turns(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "p", 0, max_position_embeddings=2048)
    listen, journal = f"unix:{tmp_path / 'b.sock'}", str(tmp_path / "journal")

    async def one(bridge: BridgeClient, number: int, held: list[Episode]) -> list[bytes]:
        episode = await bridge.start([5, 6, number], sampling=Sampling(max_tokens=120, seed=number))
        held.append(episode)
        turn = await episode.step()
        await episode.check()
        return [turn.token_ids.tobytes(), turn.logprobs.tobytes()]

    async with BridgeClient(listen) as bridge:
        with process(policy, listen, "--journal", journal, "--threads", "1") as (running, _):
            undisturbed = await asyncio.gather(*(one(bridge, number, []) for number in range(3)))
            held: list[Episode] = []
            playing = [asyncio.create_task(one(bridge, number, held)) for number in range(3)]
            await until(lambda: len(held) == 3 and all(each._running and each._running.received.count for each in held))
            running.kill()
            running.wait()
            assert not any(task.done() for task in playing)
        with process(policy, listen, "--journal", journal, "--threads", "1"):
            assert await asyncio.gather(*playing) == undisturbed
            for episode in held:
                await episode.end()


def open_of(server: Any) -> list[Any]:
    return [each for each in server.sessions._episodes.values() if each.ended is None]


@looped
async def test_restart_without_a_journal_is_an_error(policy: Path, tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with builtin_bridge(policy, tmp_path) as (_, server, _):
            bridge = await stack.enter_async_context(BridgeClient(server.address))
            episode = await bridge.start(PROMPT, sampling=SAMPLING)
            await episode.step()
        async with builtin_bridge(policy, tmp_path):
            with pytest.raises(UnknownEpisode, match=episode.id):
                await episode.step([1])


@looped
async def test_cancelled_step_ends_the_turn_and_the_episode_goes_on(policy: Path, tmp_path: Path) -> None:
    async with held_bridge(policy, tmp_path, hold_after=5) as (_, server, engine):
        async with BridgeClient(server.address) as bridge:
            episode = await bridge.start(PROMPT, sampling=SAMPLING)
            step = asyncio.create_task(episode.step())
            await until(lambda: episode._running is not None and episode._running.received.count == 5)
            with pytest.raises(BridgeError, match="runs already"):
                await episode.step()
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            await until(lambda: episode.turns)
            engine.go_on.set()
            after = await episode.step([3])
            cut = episode.turns[0]
            assert (cut.finish, len(cut.token_ids)) == (Finish.CANCELLED, 5)
            assert after.step == 2 and len(after.token_ids) == 24
            await episode.check()
            pieces = episode.stream_step()
            async for _ in pieces:
                break
            await pieces.aclose()
            await episode.check()
            assert len(episode.turns) in (2, 3)  # the engine may have finished it before


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@looped
async def test_leaving_the_client_ends_its_episodes_but_those_released(policy: Path, tmp_path: Path) -> None:
    async with held_bridge(policy, tmp_path, hold_after=3) as (_, server, engine):
        async with BridgeClient(server.address) as bridge:
            kept = await bridge.start(PROMPT, sampling=SAMPLING)
            left = await bridge.start(PROMPT, sampling=SAMPLING)
            stepping = await bridge.start(PROMPT, sampling=SAMPLING)
            task = asyncio.create_task(stepping.step())
            await until(lambda: server.sessions.running == 1)
            starting = asyncio.create_task(bridge.start(PROMPT))
            await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            kept.release()
        assert (await asyncio.gather(task, return_exceptions=True))[0] is not None
        assert server.sessions.open == 1 and server.sessions.running == 0
        phases = [server.sessions.state("", each.id).phase for each in (kept, left, stepping)]
        assert phases == ["open", "ended", "ended"]
        engine.go_on.set()
        async with BridgeClient(server.address) as bridge:
            again = await bridge.attach(kept.id, PROMPT)
            first = await again.step()
            again.release()
            with pytest.raises(TokensChanged):
                await bridge.attach(kept.id, [5, 6, 7, 9], [first])
            # a turn that the last client did not keep is read again
            resumed = await bridge.attach(kept.id, PROMPT)
            assert (await resumed.step()).token_ids.tolist() == first.token_ids.tolist()
            await resumed.step([4])
            await resumed.check()
        assert server.sessions.open == 0


@looped
async def test_leases_of_open_episodes_are_renewed(policy: Path, tmp_path: Path) -> None:
    async with builtin_bridge(policy, tmp_path, bounds=Bounds(lease_s=0.6)) as (_, server, _):
        async with BridgeClient(server.address) as bridge:
            held = await bridge.start(PROMPT, sampling=SAMPLING)
            released = await bridge.start(PROMPT, sampling=SAMPLING)
            released.release()
            await asyncio.sleep(1.5)
            assert (await bridge.state(released.id)).phase == "expired"
            assert (await held.step()).finish is Finish.LENGTH


@looped
async def test_groups_of_one_prompt_differ_unless_a_seed_is_given(policy: Path, tmp_path: Path) -> None:
    async with builtin_bridge(policy, tmp_path) as (_, server, _), BridgeClient(server.address) as bridge:

        async def tokens(sampling: Sampling) -> list[int]:
            episode = await bridge.start(PROMPT, sampling=sampling)
            return (await episode.step()).token_ids.tolist()

        assert await tokens(Sampling(max_tokens=16)) != await tokens(Sampling(max_tokens=16))
        assert await tokens(SAMPLING) == await tokens(SAMPLING)


def test_plain_client(policy: Path, tmp_path: Path) -> None:
    with process(policy, f"unix:{tmp_path / 'b.sock'}") as (_, address), Bridge(address) as bridge:
        assert bridge.info().vocabulary == 96
        episodes = [bridge.start(PROMPT, sampling=Sampling(max_tokens=8, seed=seed)) for seed in range(5)]
        turns = bridge.steps(episodes)
        assert [len(turn.token_ids) for turn in turns] == [8] * 5
        again = bridge.steps(episodes, [[number] for number in range(5)])
        assert [turn.observation_ids.tolist() for turn in again] == [[0], [1], [2], [3], [4]]
        with pytest.raises(BadMessage):
            bridge.steps(episodes[:2], [[96], [1]])
        pieces = list(episodes[2].stream_step([1]))
        assert sum(len(piece.token_ids) for piece in pieces) == 8
        assert bridge.score(episodes[2].context()).version
        assert len(episodes[2].end(reward=1.0).data) > 1000
        with bridge.start(PROMPT, sampling=Sampling(max_tokens=8)) as episode:
            episode.step()
        with pytest.raises(EpisodeEnded):
            episode.step()
    assert not [each for each in threading.enumerate() if each.name == "bridge-client"]


@looped
async def test_limits_are_the_servers(policy: Path, tmp_path: Path) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    async with bridged(engine, Limits(96, 64), tmp_path) as (_, server), BridgeClient(server.address) as bridge:
        episode = await bridge.start(PROMPT, sampling=Sampling(seed=1))
        turn: Turn = await episode.step()
        assert turn.finish is Finish.CONTEXT and len(episode.context()) == 64
    await engine.close()
