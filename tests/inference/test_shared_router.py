"""Routers that agree through a real Redis server, also when it is killed, full, stopped or refuses them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import redis
from pydantic import ValidationError

from contracts.errors import ConfigError
from inference.engines import RoutedConfig, SamplingParams, open_engine
from inference.router import Batch, Namespace, Removed, Router, RouterConfig, Stored
from inference.router import shared as module
from inference.router.shared import SharedRouter
from inference.router.wire import encode
from tests.http_client import HTTP
from tests.inference.conftest import write_checkpoint
from tests.inference.test_route_command import chat, routed, upstream
from tests.inference.test_routed_engine import served
from tests.needs import require
from tests.vllm.fleet_servers import environment
from tests.vllm.fleet_servers import until as poll

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
REPLICAS = ("http://a:1", "http://b:1")
CONFIG = RouterConfig(block_tokens=16, key="secret")


class Server:
    """redis-server at a socket in `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket, self.options = folder / "redis", options
        self.url = f"unix://{self.socket}"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                redis.from_url(self.url).ping()
                return
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    require("redis-server")
    server = Server(tmp_path)
    yield server
    server.kill(signal.SIGCONT)
    server.kill()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 30_000, length).astype(np.int32)


def router(config: RouterConfig = CONFIG) -> Router:
    made = Router(Namespace("policy"), config)
    for name in REPLICAS:
        made.add(name)
    return made


@asynccontextmanager
async def joined(server: Server, count: int = 2, **more: str) -> AsyncIterator[list[tuple[Router, SharedRouter]]]:
    found = []
    for _ in range(count):
        made = router()
        found.append((made, SharedRouter(made, server.url, **more)))
    try:
        for _, each in found:
            await each.start()
        yield found
    finally:
        for _, each in found:
            await each.close()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        await asyncio.sleep(0.01)


def predicted(one: Router, tokens: np.ndarray) -> list[tuple[int, int]]:
    return one.choose(tokens, max_tokens=1).depths


async def test_what_one_router_sends_counts_at_the_other(server: Server) -> None:
    async with joined(server) as [(first, _), (second, shared)]:
        tokens = prompt(160)
        decision = first.choose(tokens, max_tokens=40)
        first.begin(decision)
        await until(lambda: second.flying()[decision.replica] == 200)
        assert predicted(second, tokens) == predicted(first, tokens) != []
        again = second.choose(tokens, max_tokens=40)
        assert (again.replica, again.cached) == (decision.replica, 144)
        # what the replica lacks is all that is told of the next turn
        turn = first.choose(turn_tokens(tokens), max_tokens=40)
        first.begin(turn)
        await until(lambda: second.choose(turn_tokens(tokens), max_tokens=1).cached == 208)
        for each in (decision, turn):
            first.finish(each)
        await until(lambda: not any(second.flying().values()))
        assert shared.counters.unreadable == 0


def turn_tokens(tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([tokens, prompt(64, seed=9)])


@pytest.mark.parametrize("batches", [100, 1000])
async def test_routers_agree_after_many_events(server: Server, batches: int) -> None:
    """A batch has 100 events."""
    async with joined(server) as [(first, shared), (second, other)]:
        random, held, number = np.random.default_rng(0), list[tuple[str, int]](), 0
        for batch in range(batches):
            events: list[Stored | Removed] = []
            for _ in range(100):
                if held and random.random() < 0.3:
                    events.append(Removed([held.pop(random.integers(len(held)))[0]]))
                    continue
                number += 1
                held.append((f"block {number}", number))
                events.append(Stored([held[-1][0]], None, prompt(16, seed=number), 16))
            made = Batch(batch, events)
            first.apply(REPLICAS[0], made)
            shared.forward(REPLICAS[0], *encode(made))
            if batch % 20 == 0:
                await asyncio.sleep(0)
        await until(lambda: second.residency.awaited(REPLICAS[0]) == batches)
        assert len(second.index) == len(first.index) == len(held)
        for _, seed in held[:: len(held) // 200]:
            assert predicted(second, prompt(17, seed=seed)) == predicted(first, prompt(17, seed=seed)) != []
        assert shared.counters.dropped == other.counters.unreadable == 0


async def test_a_router_that_joins_learns_what_was_before(server: Server) -> None:
    async with joined(server, 1) as [(first, _)]:
        decision = first.choose(prompt(320), max_tokens=8)
        first.begin(decision)
        await until(lambda: redis.from_url(server.url).xlen(SharedRouter(router(), server.url).stream) > 0)
        async with joined(server, 1) as [(second, _)]:
            await until(lambda: second.choose(prompt(320), max_tokens=8).cached == 304)
            await until(lambda: second.flying()[decision.replica] == 328)


async def test_a_router_that_dies_has_nothing_in_flight_after_a_while(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOST_S", 1.0)
    async with joined(server) as [(first, shared), (second, _)]:
        first.begin(first.choose(prompt(32), max_tokens=8))
        await until(lambda: sum(second.flying().values()) == 40)
        for task in shared._tasks:
            task.cancel()
        await until(lambda: not any(second.flying().values()))


@pytest.mark.parametrize("fault", ["killed", "stopped", "full"])
async def test_routing_goes_on_without_redis_and_agrees_afterwards(
    server: Server, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = redis.from_url(server.url)
    async with joined(server) as [(first, shared), (second, _)]:
        if fault == "killed":
            server.kill()
        elif fault == "stopped":
            server.kill(signal.SIGSTOP)
        else:
            plain.config_set("maxmemory", 1)
        for seed in range(50):
            first.begin(first.choose(prompt(160, seed=seed), max_tokens=8))
            await asyncio.sleep(0.01)
        await until(lambda: shared.counters.failures > 0)
        if fault == "killed":
            server.start()
        elif fault == "stopped":
            server.kill(signal.SIGCONT)
        else:
            plain.config_set("maxmemory", 0)
        await until(lambda: second.flying() == first.flying())
        for seed in range(50):
            assert predicted(second, prompt(160, seed=seed)) == predicted(first, prompt(160, seed=seed))
    said = [each.getMessage() for each in caplog.records if "Redis fails" in each.getMessage()]
    assert 1 <= len(said) <= 2, "once by each router"


async def test_too_much_news_is_dropped_and_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    first = router()
    shared = SharedRouter(first, server.url)
    for seed in range(5):
        first.begin(first.choose(prompt(32, seed=seed), max_tokens=8))
    assert shared.counters.dropped == 2
    await shared.close()


async def test_routers_of_other_keys_block_sizes_and_fleets_have_streams_of_their_own(server: Server) -> None:
    streams = {
        SharedRouter(router(config), server.url, fleet).stream
        for config, fleet in (
            (CONFIG, "default"),
            (CONFIG, "night"),
            (RouterConfig(block_tokens=32, key="secret"), "default"),
            (RouterConfig(block_tokens=16), "default"),
        )
    }
    assert len(streams) == 4 and not any("secret" in each for each in streams)


async def test_entries_that_are_none_of_a_router_are_left_out(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with joined(server) as [(first, _), (second, shared)]:
        plain = redis.from_url(server.url)
        for fields in (
            {"x": "y"},
            {"from": "z", "data": b"\xff\xff"},
            {"from": "z", "data": b"\x01"},
            {"data": b"\x80"},
        ):
            plain.xadd(shared.stream, fields)
        decision = first.choose(prompt(32), max_tokens=8)
        first.begin(decision)
        await until(lambda: second.flying()[decision.replica] == 40)
        assert shared.counters.unreadable == 4
    assert sum("none of a router" in each.getMessage() for each in caplog.records) == 2


async def test_a_wrong_password_and_a_wrong_url_are_named(tmp_path: Path) -> None:
    require("redis-server")
    server = Server(tmp_path, "--requirepass", "right")
    try:
        for url in (server.url, f"unix://:wrong-word@{server.socket}"):
            with pytest.raises(ConfigError, match=r"refuses the user or the password") as refused:
                await SharedRouter(router(), url).start()
            assert "wrong-word" not in str(refused.value)
    finally:
        server.kill()
    with pytest.raises(ConfigError, match=r"no address of a Redis server.*redis://HOST:PORT/0"):
        SharedRouter(router(), "http://a:1")


def test_two_commands_see_each_others_requests(server: Server) -> None:
    with ExitStack() as stack:
        upstreams = [stack.enter_context(upstream()) for _ in range(2)]
        urls = [each.url for each in upstreams]
        faces = [stack.enter_context(routed(urls, "--redis", server.url)) for _ in range(2)]
        sent = stack.enter_context(
            HTTP.stream("POST", f"{faces[0].url}/v1/chat/completions", json=chat(max_tokens=500), timeout=60)
        )
        busy = sent.headers["x-replica"]
        poll(lambda: faces[1].metric("route_flying_tokens", replica=busy) >= 500)
        assert faces[1].metric("route_shared_total", result="received") >= 1
        for each in upstreams:
            each.go.set()
        sent.read()
        poll(lambda: faces[1].metric("route_flying_tokens") == 0)
        assert [each.end() for each in faces] == [0, 0]


def test_the_command_names_what_redis_refuses() -> None:
    command = [sys.executable, "-m", "inference", "route", "--replica", "http://127.0.0.1:1", "--redis", "http://a"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no address of a Redis server" in done.stderr and "Traceback" not in done.stderr


async def test_routed_engines_of_two_processes_know_what_each_has_sent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUTED_REDIS", server.url)
    directory = write_checkpoint(tmp_path / "policy", 0)
    with served(directory, "v1") as first, served(directory, "v1") as second:
        replicas = [{"kind": "openai", "base_url": url} for url in (first, second)]
        config = RoutedConfig.model_validate({"kind": "routed", "replicas": replicas, "redis_env": "ROUTED_REDIS"})
        one, other = (open_engine(config, directory, "v1") for _ in range(2))
        await asyncio.gather(one.version(), other.version())
        for token in range(6):
            await one.generate([token + 1] * 64, SamplingParams(1.0, 2, token))
            held = one._router.choose([token + 1] * 65, max_tokens=1)
            assert held.cached == 64
            known = partial(other._router.choose, [token + 1] * 65, max_tokens=1)
            await until(lambda known=known: known().cached == 64)
            assert known().replica == held.replica
        await one.load_weights(directory, "v2")
        await one.close()
        await other.close()
    alone = {"kind": "routed", "replicas": [replicas[0], {"kind": "builtin"}], "redis_env": "ROUTED_REDIS"}
    with pytest.raises(ValidationError, match="but replica 1 belongs to this one"):
        RoutedConfig.model_validate(alone)
