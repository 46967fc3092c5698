"""`python -m inference bridge` as a process: killed, drained, interrupted, restarted, and started wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contracts.pb import bridge_pb2 as pb
from contracts.rpc.listening import Listening
from inference.__main__ import main
from inference.bridge.journal import Journal
from inference.bridge.registry import Bounds
from inference.bridge.serve import Options, _serve, limits_of
from inference.engines import VllmConfig, open_engine
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.vllm import VllmEngine
from inference.errors import EngineStopped
from tests.bridge.bridge_harness import (
    PROMPT,
    Client,
    Turned,
    builtin_bridge,
    held_bridge,
    ids,
    new_id,
    process,
    refused,
    start_request,
)
from tests.http_client import HTTP
from tests.inference.conftest import break_engine, write_checkpoint
from tests.vllm.conftest import fake_config

pytestmark = pytest.mark.slow

LONG = 3000
"""Tokens of a turn that is still running when its bridge is killed."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0, max_position_embeddings=4096)


async def sampled(policy: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    engine = BuiltinEngine(policy, "v1", threads=1)
    completion = await engine.generate(prompt, SamplingParams(1.0, count, 7))
    await engine.close()
    return completion.token_ids, completion.logprobs


def test_killed_bridge_goes_on_with_the_same_tokens(policy: Path, tmp_path: Path) -> None:
    listen, journal = f"unix:{tmp_path / 'b.sock'}", ("--journal", str(tmp_path / "journal"), "--version", "v1")
    finished, running, ended = new_id(), new_id(), new_id()
    first, seen = Turned(), Turned()

    async def before(address: str, killed: subprocess.Popen[str]) -> tuple[bytes, str]:
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            for name in (finished, running, ended):
                await client.start(start_request(name, sampling=pb.Sampling(max_tokens=9, seed=7), labels={"a": "b"}))
                vars(first).update(vars(await client.step(name, 1)))
            record = await client.end(ended, reward=0.25)
            call = client.step_call(running, 2, [9], sampling=pb.Sampling(max_tokens=LONG, seed=7))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for event in call:
                    seen.add(event)
                    if len(seen.tokens) > 20:
                        killed.send_signal(signal.SIGKILL)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            return record

    async def after(address: str, record: tuple[bytes, str]) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client = Client(channel)
            state = await client.state(running)
            assert (state.phase, state.steps) == ("stepping", 2) and state.tokens >= 4 + 9 + 1 + len(seen.tokens)
            kept = state.tokens - 14
            call = client.step_call(
                running, 2, [9], from_token=len(seen.tokens), sampling=pb.Sampling(max_tokens=LONG, seed=7)
            )
            count = kept + 200
            async for event in call:  # no token that was seen comes again, or differently
                seen.add(event)
                if len(seen.tokens) >= count:
                    break
            await client.cancel(running, 2)
            expected = await sampled(policy, [*PROMPT, *first.tokens, 9], len(seen.tokens))
            assert (seen.tokens, seen.logprobs) == expected
            assert vars(await client.step(finished, 1)) == vars(first)
            assert await client.end(ended) == record
            assert (await client.state(ended)).phase == "ended"

    with process(policy, listen, *journal) as (killed, address):
        record = asyncio.run(before(address, killed))
    with process(policy, listen, *journal) as (_, address):
        asyncio.run(after(address, record))


def test_turn_cut_at_any_token_continues_as_if_undisturbed(policy: Path, tmp_path: Path) -> None:
    """Without a kill: the bridge is closed in the turn, again and again, and opened on the same journal."""

    async def run() -> None:
        names, held = [new_id() for _ in range(3)], 0
        sampling = pb.Sampling(max_tokens=30, seed=7)
        for name in names:
            async with builtin_bridge(policy, tmp_path, journal=tmp_path / "journal") as (client, _, _):
                await client.start(start_request(name, sampling=sampling))
        for held in (0, 1, 6, 13, 30):
            async with held_bridge(policy, tmp_path, held, journal=tmp_path / "journal") as (client, bridge, _):
                calls = [client.step_call(name, 1) for name in names]
                deadline = time.monotonic() + 10
                while bridge.sessions.running < 3 and held < 30 and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                for call in calls:
                    call.cancel()
        async with builtin_bridge(policy, tmp_path, journal=tmp_path / "journal") as (client, bridge, _):
            expected = await sampled(policy, PROMPT, 30)
            for name in names:
                turned = await client.step(name, 1)
                assert (turned.tokens, turned.logprobs) == expected and turned.finish == pb.LENGTH
                await client.end(name)
            assert bridge.sessions.open == 0

    asyncio.run(run())


def test_full_disk_stops_a_turn_and_loses_nothing(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        async with held_bridge(policy, tmp_path, 5, journal=tmp_path / "journal") as (client, bridge, engine):
            name, turned = new_id(), Turned()
            await client.start(start_request(name))
            call = client.step_call(name, 1)
            while len(turned.tokens) < 5:
                turned.add(await anext(aiter(call)))
            with monkeypatch.context() as patched:
                patched.setattr("inference.bridge.journal.os.write", full)
                engine.go_on.set()
                async with refused("UNAVAILABLE", "JournalError", "free some space"):
                    async for event in call:
                        turned.add(event)
                async with refused("UNAVAILABLE", "JournalError", "free some space"):
                    await client.start(start_request(new_id()))
                async with refused("UNAVAILABLE", "JournalError", "free some space"):
                    await client.cancel(name, 1)
                assert len(turned.tokens) == 5 and (await client.state(name)).phase == "stepping"
            assert (bridge.sessions.open, bridge.sessions.running) == (1, 0)
            async for event in client.step_call(name, 1, from_token=5):
                turned.add(event)
            assert (turned.tokens, turned.logprobs) == await sampled(policy, PROMPT, 24)
        async with builtin_bridge(policy, tmp_path, journal=tmp_path / "journal") as (client, _, _):
            assert vars(await client.step(name, 1)) == vars(turned)

    asyncio.run(run())


def test_expired_and_forgotten_episodes_do_not_come_back(policy: Path, tmp_path: Path) -> None:
    async def run() -> None:
        folder, name, kept = tmp_path / "journal", new_id(), new_id()
        async with builtin_bridge(policy, tmp_path, journal=folder, bounds=Bounds(lease_s=0.5)) as (client, _, _):
            await client.start(start_request(name))
            await asyncio.sleep(1.2)
            assert (await client.state(name)).phase == "expired"
            await client.start(start_request(kept))
        async with builtin_bridge(policy, tmp_path, journal=folder) as (client, bridge, _):
            assert (await client.state(kept)).phase == "open"
            async with refused("NOT_FOUND", "UnknownEpisode"):
                await client.state(name)
            assert bridge.sessions.open == 1

    asyncio.run(run())


def test_sigterm_lets_turns_end_and_ctrl_c_does_not_wait(policy: Path, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 'b.sock'}"

    async def drained(address: str, running: subprocess.Popen[str]) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client, name = Client(channel), new_id()
            await client.start(start_request(name, sampling=pb.Sampling(max_tokens=400, seed=7)))
            turned, call = Turned(), client.step_call(name, 1)
            turned.add(await anext(aiter(call)))
            running.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            async with refused("UNAVAILABLE", "Draining", "starts no more episodes"):
                await client.start(start_request(new_id()))
            async for event in call:
                turned.add(event)
            assert (turned.finish, len(turned.tokens)) == (pb.LENGTH, 400)

    async def interrupted(address: str, running: subprocess.Popen[str]) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client, name = Client(channel), new_id()
            await client.start(start_request(name, sampling=pb.Sampling(max_tokens=LONG, seed=7)))
            call = client.step_call(name, 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    running.send_signal(signal.SIGINT)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    journal = ("--journal", str(tmp_path / "journal"))
    with process(policy, listen, *journal) as (running, address):
        asyncio.run(drained(address, running))
        assert running.wait(10) == 0
        assert not (tmp_path / "b.sock").exists()
    with process(policy, listen, *journal) as (running, address):
        began = time.monotonic()
        asyncio.run(interrupted(address, running))
        assert running.wait(10) == 130 and time.monotonic() - began < 8
    assert Journal(tmp_path / "journal").read(), "nobody holds it"


def test_bridge_of_an_engine_server_gives_the_same_tokens(policy: Path, tmp_path: Path) -> None:
    async def run(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client, name = Client(channel), new_id()
            await client.start(start_request(name))
            turned = await client.step(name, 1)
            assert (turned.tokens, turned.logprobs) == await sampled(policy, PROMPT, 24)
            assert turned.spans == [("v1", 0, 24)] and turned.finish == pb.LENGTH

    with process(policy, "127.0.0.1:0", "--version", "v1", command="serve") as (serving, url):
        with process(policy, f"unix:{tmp_path / 'b.sock'}", "--version", "v1", "--engine-url", url) as (_, address):
            asyncio.run(run(address))
            serving.kill()
            serving.wait()

            async def lost() -> None:
                async with grpc.aio.insecure_channel(address) as channel:
                    async with refused("UNAVAILABLE", "EngineUnreachable"):
                        await Client(channel).start(start_request(new_id()))

            asyncio.run(lost())


def test_bridge_of_an_engine_server_samples_what_that_server_serves(policy: Path, tmp_path: Path) -> None:
    second, listen = (
        write_checkpoint(tmp_path / "second", 1, max_position_embeddings=4096),
        f"unix:{tmp_path / 'b.sock'}",
    )

    async def run(address: str, url: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel, httpx.AsyncClient(timeout=60) as http:
            client, name = Client(channel), new_id()
            assert (await client.start(start_request(name))).version == "v1"
            assert (await client.step(name, 1)).spans == [("v1", 0, 24)]
            answer = await http.post(f"{url}/load_weights", json={"directory": str(second), "version": "v2"})
            answer.raise_for_status()
            assert list((await client.stub.Info(pb.InfoRequest())).versions) == ["v2"]
            assert (await client.step(name, 2, [9])).finish == pb.STALE
            name = new_id()
            await client.start(start_request(name))
            turned = await client.step(name, 1)
            assert turned.spans == [("v2", 0, 24)] and turned.tokens == (await sampled(second, PROMPT, 24))[0]
            score = await client.stub.Score(pb.ScoreRequest(ids=ids(PROMPT)))
            assert score.version == "v2"

    with process(policy, "127.0.0.1:0", "--version", "v1", command="serve") as (_, url):
        with process(policy, listen, "--engine-url", url) as (_, address):
            asyncio.run(run(address, url))
        with pytest.raises(AssertionError, match="the engine serves policy v2, not v1"):
            with process(policy, listen, "--engine-url", url, "--version", "v1"):
                pass


def test_port_makes_and_prints_a_key(policy: Path, tmp_path: Path) -> None:
    async def run(address: str, key: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            async with refused("UNAUTHENTICATED", "AccessDenied"):
                await Client(channel).state(new_id())
            info = await Client(channel, key).stub.Info(pb.InfoRequest(), metadata=Client(channel, key).metadata)
            assert (info.vocabulary, info.context_tokens, list(info.versions)) == (96, 4096, ["p"])

    with process(policy, "127.0.0.1:0") as (running, address):
        assert running.stderr is not None
        said = running.stderr.readline()
        assert address.startswith("127.0.0.1:") and not address.endswith(":0")
        asyncio.run(run(address, said.split("asks for this key: ")[1].split()[0]))


@pytest.fixture
def handlers() -> Iterator[None]:
    """A bridge in this process takes its signals and keeps them when it ends: later tests need theirs back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_bridge_ends_when_its_engine_fails(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_engine(monkeypatch)
    monkeypatch.setattr("inference.engines.base.LOOK_S", 0.01)

    async def run() -> None:
        options = Options(Listening(f"unix:{tmp_path / 'b.sock'}"))
        serving, said = asyncio.create_task(_serve(policy, "v1", limits_of(policy), options)), ""
        while (address := re.search(r"at (\S+)", said)) is None:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        async with grpc.aio.insecure_channel(address[1]) as channel:
            client, name, statuses = Client(channel), new_id(), list[int]()
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            statuses.append((await health.read()).status)
            await client.start(start_request(name))
            assert (await client.step(name, 1)).finish == pb.ENGINE_LOST
            statuses.append((await health.read()).status)
            assert statuses == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
            with pytest.raises(EngineStopped, match="no room"):
                await serving

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.usefixtures("handlers")
def test_a_bridge_ends_when_its_vllm_is_not_started_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPLANE_CACHE", str(tmp_path / "cache"))
    engines = list[VllmEngine]()

    def opened(spec: VllmConfig, directory: Path, version: str, *, pinned: bool) -> VllmEngine:
        engines.append(open_engine(spec, directory, version))
        return engines[-1]

    monkeypatch.setattr("inference.bridge.serve.open_engine", opened)

    async def run() -> None:
        options = Options(Listening(f"unix:{tmp_path / 'b.sock'}"), engine=fake_config(max_restarts=1))
        serving, said = asyncio.create_task(_serve(policy, "v1", limits_of(policy), options)), ""
        while (address := re.search(r"at (\S+)", said)) is None:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        async with grpc.aio.insecure_channel(address[1]) as channel:
            client = Client(channel)
            for _ in range(2):
                name = new_id()
                await client.start(start_request(name))
                assert (await client.step(name, 1)).finish == pb.LENGTH, "it serves, again after a restart"
                with contextlib.suppress(httpx.RemoteProtocolError):
                    await asyncio.to_thread(HTTP.post, f"{engines[0]._keeper.address}/fault", json={"die": True})
                assert (await client.step(name, 2)).finish == pb.ENGINE_LOST
            with pytest.raises(EngineStopped, match=r"vLLM died 2 times, see engine\.max_restarts"):
                await serving

    asyncio.run(asyncio.wait_for(run(), 240))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "nowhere"], "--policy nowhere: neither a directory nor a checkpoint"),
        (["--policy", "."], "--policy . is no checkpoint"),
        (["--listen", "nowhere"], "--listen 'nowhere' is not an address"),
        (["--listen", "0.0.0.0:1"], "can be reached from other machines"),
        (["--key-file", "/nowhere"], "/nowhere"),
        (["--listen", "127.0.0.1:0"], "needs --key-file: a made key is another one after a restart"),
        (["--policy-file", "."], "give either --policy or --policy-file"),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_wrong_options_end_in_one_line(
    policy: Path,
    tmp_path: Path,
    options: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"--policy": str(policy), "--listen": f"unix:{tmp_path / 'b.sock'}", "--store": str(tmp_path)}
    given |= {"--journal": str(tmp_path / "journal")} | dict([options])
    monkeypatch.setattr(sys, "argv", ["inference", "bridge", *(part for pair in given.items() for part in pair)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("error: ") and said.count("\n") == 1 and words in said, said
