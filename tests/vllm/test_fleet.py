"""Several servers of one policy: spread, failures, and no token of a server that is not proven to serve the policy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from contracts.errors import ConfigError
from inference.engines import SamplingParams, VllmConfig, fleet, open_engine, replica
from inference.engines.fleet import FleetEngine, give_back_fleet
from inference.errors import EngineStopped, EngineUnreachable, StaleVersion, WeightsDiffer
from tests.inference.test_shared_router import Server
from tests.needs import require
from tests.ports import free_port
from tests.vllm.fleet_servers import StubServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FIRST, SECOND = "a" * 64, "b" * 64
Policies = tuple[Path, Path]


@pytest.fixture(scope="module")
def started(policies: Policies) -> Iterator[list[StubServer]]:
    servers = [StubServer(policies[0], flags=("--enable-sleep-mode",)) for _ in range(3)]
    for each in servers:
        each.start()
    yield servers
    for each in servers:
        each.stop()


@pytest.fixture
def servers(started: list[StubServer], monkeypatch: pytest.MonkeyPatch) -> list[StubServer]:
    """Three, without faults and proven for nothing; those that a test left dead are started again."""
    monkeypatch.setattr(fleet, "WATCH_S", 0.2)
    for each in started:
        if not each.is_running():
            each.start()
    for each in started:
        each.wait()
        each.tell()
        each.mark("default")
    return started


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other client loads a policy: what looks like its unfinished load was left behind by ours."""
    monkeypatch.setattr(replica, "OTHERS_S", (0.5, 0.5, 0.5))


def opened(servers: list[StubServer], policies: Policies, **changes: object) -> FleetEngine:
    addresses = ",".join(each.url for each in servers)
    config = VllmConfig.model_validate({"base_url": addresses, "retries": 1, **changes})
    engine = open_engine(config, policies[0], FIRST)
    assert isinstance(engine, FleetEngine)
    return engine


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=4, seed=seed)


async def play(engine: FleetEngine, episodes: range) -> list[str]:
    """Versions of a turn of each episode, all at once."""
    found = await asyncio.gather(*(engine.generate([1, 2, 3], params(each)) for each in episodes))
    return [version for each in found for version, _, _ in each.spans]


async def reached(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_calls_are_spread_and_turns_of_an_episode_stay_on_its_server(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    assert await engine.version() == FIRST and len(engine.serving()) == 3
    before = [len(each.asked()) for each in servers]
    for _ in range(5):  # before the router learns of a busy machine that one server is slower
        await engine.generate([1, 2, 3], params(7))
    turns = [len(each.asked()) - count for each, count in zip(servers, before, strict=True)]
    assert sorted(turns) == [0, 0, 5]
    for each in servers:
        each.tell(hold=0.3)
    assert await play(engine, range(60)) == [FIRST] * 60
    load = [len(each.asked()) - count - own for each, count, own in zip(servers, before, turns, strict=True)]
    assert sum(load) == 60 and max(load) <= 26, "bounded: a quarter above the mean, rounded up"
    await engine.close()


async def test_update_reaches_every_server_and_requests_in_flight_keep_their_policy(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    await engine.version()
    for each in servers:
        each.tell(hold=0.5)
    in_flight = asyncio.create_task(play(engine, range(6)))
    await asyncio.sleep(0.2)
    await engine.load_weights(policies[1], SECOND)
    assert await in_flight == [FIRST] * 6
    assert {each.version() for each in servers} == {SECOND} == {await engine.version()}
    assert await play(engine, range(6)) == [SECOND] * 6
    await engine.close()


@pytest.mark.usefixtures("alone")
async def test_server_with_wrong_weights_is_never_asked_until_it_is_verified(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    await engine.version()
    servers[1].tell(stale=True)
    before = servers[1].asked()
    await engine.load_weights(policies[1], SECOND)
    assert engine.serving() == [servers[0].url, servers[2].url]
    assert await play(engine, range(30)) == [SECOND] * 30
    assert servers[1].asked() == before
    servers[1].tell()
    await reached(lambda: servers[1].url in engine.serving())
    await play(engine, range(30))
    assert len(servers[1].asked()) > len(before) and servers[1].version() == SECOND
    await engine.close()


@pytest.mark.usefixtures("alone")
async def test_no_server_is_one_error_that_names_each(servers: list[StubServer], policies: Policies) -> None:
    engine = opened(servers, policies)
    await engine.version()
    for each in servers:
        each.tell(stale=True)
    with pytest.raises(WeightsDiffer) as differ:
        await engine.load_weights(policies[1], SECOND)
    assert all(each.url in str(differ.value) for each in servers) and "experts.w13" in str(differ.value)
    for each in servers:
        each.tell()
    assert await play(engine, range(6)) == [FIRST] * 6 and await engine.version() == FIRST
    await engine.close()
    for each in servers:
        each.tell(stale=True)
    nowhere = f"http://127.0.0.1:{free_port()}"
    engine = opened(servers, policies, base_url=f"{servers[0].url},{nowhere}")
    with pytest.raises(EngineUnreachable, match=r"none of 2 server\(s\) serves policy bbb") as mixed:
        await engine.load_weights(policies[1], SECOND)
    assert f"{nowhere}: " in str(mixed.value) and f"{servers[0].url}: " in str(mixed.value)
    await engine.close()


@pytest.mark.usefixtures("alone")
async def test_calls_of_a_server_that_dies_are_repeated_on_another_one(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    await engine.version()
    for each in servers:
        each.tell(hold=1.0)
    in_flight = asyncio.create_task(play(engine, range(30)))
    await asyncio.sleep(0.5)
    servers[2].signal(signal.SIGKILL)
    assert await in_flight == [FIRST] * 30
    assert servers[2].url not in engine.serving()
    servers[2].stop()
    servers[2].start()
    servers[2].wait()
    await reached(lambda: servers[2].url in engine.serving())
    await play(engine, range(30))
    assert FIRST in servers[2].asked() and servers[2].version() == FIRST, "it was loaded and verified before"
    await engine.close()


async def test_server_that_hangs_loses_its_calls_to_the_others(
    servers: list[StubServer], policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "CHECK_S", 0.5)
    engine = opened(servers, policies)
    await engine.version()
    for each in servers:
        each.tell(hold=0.5)
    in_flight = asyncio.create_task(play(engine, range(30)))
    await asyncio.sleep(0.2)
    servers[0].signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            assert await in_flight == [FIRST] * 30
        assert servers[0].url not in engine.serving()
    finally:
        servers[0].signal(signal.SIGCONT)
    await reached(lambda: servers[0].url in engine.serving())
    await engine.close()


async def test_a_stream_tells_when_it_begins_and_has_proven_tokens_at_its_end(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    for each in servers:
        each.tell(token_s=0.02)
    pieces = [piece async for piece in engine.stream([1, 2, 3], params(5))]
    assert [len(piece.token_ids) for piece in pieces] == [0, 4] and pieces[1].spans == [(FIRST, 0, 4)]
    assert pieces[1].token_ids.tolist() == (await engine.generate([1, 2, 3], params(5))).token_ids
    for each in servers[1:]:
        each.tell(cut=2)
    versions = [piece.spans[0][0] async for piece in engine.stream([7, 8, 9], params(6)) if len(piece.token_ids)]
    assert versions == [FIRST], "a stream that breaks off is repeated at a server that is well"
    await engine.close()


async def test_a_turn_that_a_server_does_not_begin_is_sent_to_a_second_one(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies, hedging_delay_s=0.2)
    assert engine.hedging is not None
    await play(engine, range(2))
    servers[0].tell(hold=3)
    began = time.monotonic()
    assert await play(engine, range(10, 26)) == [FIRST] * 16
    assert engine.hedging.won and time.monotonic() - began < 3, "no turn waited for the slow server"
    await engine.close()


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Setting of engines that share through a Redis server."""
    require("redis-server")
    server = Server(tmp_path)
    monkeypatch.setenv("FLEET_REDIS", server.url)
    yield {"redis_env": "FLEET_REDIS"}
    server.kill()


async def test_engines_of_two_processes_know_each_others_requests_in_flight(
    servers: list[StubServer], policies: Policies, shared: dict[str, str]
) -> None:
    for setting, wanted in (({}, [0, 0, 2]), (shared, [0, 1, 1])):
        first, second = opened(servers, policies, **setting), opened(servers, policies, **setting)
        await asyncio.gather(first.version(), second.version())
        before = [len(each.asked()) for each in servers]
        for each in servers:
            each.tell(hold=2)
        held = asyncio.create_task(first.generate([1, 2, 3], params(7)))
        await reached(lambda count=sum(before) + 1: sum(len(each.asked()) for each in servers) == count)
        if setting:
            await reached(lambda router=second._router: any(router.flying().values()))
        await second.generate([1, 2, 3], params(7))
        await held
        asked = [len(each.asked()) - count for each, count in zip(servers, before, strict=True)]
        assert sorted(asked) == wanted, "the same episode has the same first choice"
        for engine in (first, second):
            await engine.close()
        for each in servers:
            each.tell()


def test_sharing_without_a_redis_server_or_a_fleet_is_one_clear_error(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"base_url": "http://a:1,http://b:1"}
    for value in (None, " "):
        monkeypatch.delenv("NO_REDIS", raising=False) if value is None else monkeypatch.setenv("NO_REDIS", value)
        with pytest.raises(ConfigError, match=r"engine.redis_env names \$NO_REDIS, which is not set: set it to redis:"):
            open_engine(VllmConfig.model_validate({**two, "redis_env": "NO_REDIS"}), policies[0], FIRST)
    for wrong, words in (({"base_url": "http://a:1"}, "redis_env needs a fleet"), ({**two}, "should match pattern")):
        name = "redis://host" if words.startswith("should") else "NO_REDIS"
        with pytest.raises(ValidationError, match=words):
            VllmConfig.model_validate({**wrong, "redis_env": name})


@pytest.mark.usefixtures("alone")
async def test_server_that_names_another_policy_is_left_out_and_given_up_if_it_goes_on(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers[:2], policies)
    await engine.version()
    servers[1].mark(SECOND)
    assert await play(engine, range(30)) == [FIRST] * 30, "what it answered is not used"
    await reached(lambda: servers[1].version() == FIRST)
    servers[1].tell(reborn=True)  # it forgets what was loaded whenever it is marked
    servers[1].mark(SECOND)
    for _ in range(8):
        assert await play(engine, range(30)) == [FIRST] * 30
        await asyncio.sleep(0.1)
    await engine.close()


async def test_watch_finds_a_server_that_was_restarted_before_it_is_asked(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    await engine.version()
    servers[0].stop()
    servers[0].start()
    servers[0].wait()
    await reached(lambda: servers[0].version() == FIRST)
    assert servers[0].asked() == []
    await engine.close()


async def test_fault_of_the_request_costs_at_most_three_tries_and_no_server_stays_out(
    servers: list[StubServer], policies: Policies
) -> None:
    engine = opened(servers, policies)
    await engine.version()
    before = sum(len(each.asked()) for each in servers)
    for each in servers:
        each.tell(broken=True)
    with pytest.raises(EngineStopped, match="answered 500"):
        await engine.generate([1, 2], params(1))
    assert sum(len(each.asked()) for each in servers) - before == 3
    for each in servers:
        each.tell()
    await reached(lambda: len(engine.serving()) == 3)
    assert await play(engine, range(6)) == [FIRST] * 6
    await engine.close()


@pytest.mark.usefixtures("alone")
async def test_fleet_waits_for_a_server_to_come_back_and_says_when_none_does(
    servers: list[StubServer], policies: Policies
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    engine = opened(servers, policies, base_url=f"{servers[0].url},{nowhere}", startup_timeout_s=2)
    await engine.version()
    servers[0].stop()
    with pytest.raises(EngineUnreachable, match=r"none of 2 server\(s\)|can't be reached"):
        for _ in range(3):
            await engine.generate([1, 2], params(1))
    servers[0].start()
    servers[0].wait()
    await reached(lambda: bool(engine.serving()))
    assert await play(engine, range(2)) == [FIRST] * 2
    await engine.close()
    with pytest.raises(EngineStopped, match="closed"):
        await engine.generate([1, 2], params(1))


async def test_sleeping_fleet_wakes_with_the_next_policy(servers: list[StubServer], policies: Policies) -> None:
    engine = opened(servers, policies, idle="sleep")
    await engine.version()
    await engine.close()
    config = VllmConfig(base_url=",".join(each.url for each in servers), idle="sleep")
    await give_back_fleet(config)
    assert all(each.version().startswith("unproven:asleep:") for each in servers)
    engine = opened(servers, policies, idle="sleep")
    await engine.load_weights(policies[1], SECOND)
    assert await play(engine, range(9)) == [SECOND] * 9 and len(engine.serving()) == 3
    await engine.close()


@pytest.mark.slow
async def test_clients_of_one_policy_that_start_at_once_let_each_other_finish(
    servers: list[StubServer], policies: Policies
) -> None:
    engines = [opened(servers, policies) for _ in range(3)]
    assert await asyncio.gather(*(each.version() for each in engines)) == [FIRST] * 3
    await reached(lambda: all(len(each.serving()) == 3 for each in engines))
    for each in engines:
        assert await play(each, range(6)) == [FIRST] * 6
        await each.close()


async def test_another_policy_is_never_taken_for_ours(servers: list[StubServer], policies: Policies) -> None:
    mine, theirs = opened(servers[:2], policies), opened(servers[:2], policies)
    found = {FIRST: set[str](), SECOND: set[str]()}

    async def sample(engine: FleetEngine, own: str) -> None:
        try:
            for _ in range(20):
                found[own].update(await play(engine, range(4)))
        except (StaleVersion, EngineUnreachable) as error:
            assert re.search("another client|serves bbb|serves aaa|unproven", str(error))

    await mine.version()
    with contextlib.suppress(StaleVersion, EngineUnreachable):
        await theirs.load_weights(policies[1], SECOND)
    await asyncio.gather(sample(mine, FIRST), sample(theirs, SECOND))
    assert found[FIRST] <= {FIRST} and found[SECOND] <= {SECOND}
    await mine.close()
    await theirs.close()
