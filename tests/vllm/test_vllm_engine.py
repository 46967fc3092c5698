"""The client of vLLM against a server that speaks its surface over our own forward pass, with faults on demand."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.engines import BuiltinConfig, Completion, RoutedConfig, SamplingParams, open_engine, vllm
from inference.engines.builtin import BuiltinEngine
from inference.engines.http import JsonClient
from inference.engines.seeds import mixed_seed
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_keeper import VllmKeeper
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion, WeightsDiffer
from tests.http_client import HTTP
from tests.ports import free_port
from tests.vllm.conftest import fake_config
from tests.vllm.fleet_servers import StubServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FIRST, SECOND = "a" * 64, "b" * 64
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)
Policies = tuple[Path, Path]


@pytest.fixture(scope="module")
def kept() -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(fake_config())
    yield keeper
    keeper.stop()


@pytest.fixture
def keeper(kept: VllmKeeper) -> VllmKeeper:
    """Of one server for all tests, without faults; one that a test leaves dead is started again by the next."""
    if kept.address is not None:
        try:
            tell(kept)
        except httpx.ConnectError:
            kept.stop()  # its guard has not seen its end yet
    return kept


def tell(keeper: VllmKeeper, **fault: Any) -> None:
    """Switch faults on and off."""
    try:
        HTTP.post(f"{keeper.address}/fault", json=fault, timeout=30)
    except httpx.RemoteProtocolError:
        assert fault.get("die")


def seen(keeper: VllmKeeper) -> Any:
    return HTTP.get(f"{keeper.address}/seen", timeout=30).json()


def mark(keeper: VllmKeeper, version: str) -> None:
    """Give the server a version, as somebody else would."""
    HTTP.post(f"{keeper.address}/update_weight_version", json={"new_version": version}, timeout=30)


def managed(keeper: VllmKeeper, policies: Policies, **changes: object) -> VllmEngine:
    return open_engine(fake_config(**changes), policies[0], FIRST, keeper)


async def test_every_token_carries_the_version_the_server_marked_it_with(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    assert await engine.version() == FIRST
    tell(keeper, hold=0.5)
    in_flight = asyncio.create_task(engine.generate([1, 2, 3], PARAMS))
    await asyncio.sleep(0.2)
    await engine.load_weights(policies[1], SECOND)
    after = await engine.generate([1, 2, 3], PARAMS)
    assert (await in_flight).spans == [(FIRST, 0, 8)], "a request in flight finishes with the weights it began with"
    assert after.spans == [(SECOND, 0, 8)]
    salts = [salt for salt in seen(keeper)["salts"] if not salt.startswith("probe of")]
    assert salts == [FIRST, SECOND], "a prefix of older weights is never found"
    await engine.close()


async def test_an_update_pauses_loads_resets_compares_and_only_then_names_the_version(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    before = len(seen(keeper)["calls"])
    await engine.load_weights(policies[1], SECOND)
    calls = [call for call in seen(keeper)["calls"][before:] if not call.startswith("inference")]
    assert calls == [
        "pause mode=wait",
        "update_weight_version",
        "collective_rpc  triplane_load",
        "reset_prefix_cache",
        "collective_rpc  triplane_verify",
        "collective_rpc  triplane_loaded",
        "resume",
        "collective_rpc  triplane_loaded",
        "update_weight_version",
        "collective_rpc  triplane_loaded",
    ]
    reference = BuiltinEngine(policies[1], SECOND, threads=1)
    assert await engine.score([5, 6, 7]) == pytest.approx(await reference.score([5, 6, 7]), abs=1e-4)
    await reference.close()
    await engine.close()


async def test_an_update_that_is_cancelled_while_it_pauses_lets_the_server_go_on(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    before = len(seen(keeper)["calls"])
    tell(keeper, hold=1)
    in_flight = asyncio.create_task(engine.generate([1, 2, 3], PARAMS))
    update = asyncio.create_task(engine.load_weights(policies[1], SECOND))
    while "pause mode=wait" not in seen(keeper)["calls"][before:]:
        await asyncio.sleep(0.02)
    update.cancel()
    await asyncio.wait([update])
    assert update.cancelled() and seen(keeper)["calls"][-1] == "resume"
    assert (await in_flight).spans == [(FIRST, 0, 8)]
    await engine.close()


async def test_a_server_whose_update_was_killed_while_it_paused_is_updated_again(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    HTTP.post(f"{keeper.address}/pause?mode=abort", timeout=30)
    engine.doubt()
    async with asyncio.timeout(60):
        assert (await engine.generate([1, 2, 3], PARAMS)).spans == [(FIRST, 0, 8)]
    await engine.close()


async def test_wrong_weights_are_refused_by_name_and_a_server_of_ours_is_started_again(
    keeper: VllmKeeper, policies: Policies, caplog: pytest.LogCaptureFixture
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    theirs = open_engine(fake_config(base_url=keeper.address), policies[1], SECOND)
    tell(keeper, stale=True)
    with pytest.raises(WeightsDiffer, match=r"layer 0: experts\.w13 holds other numbers"):
        await theirs.version()
    tell(keeper, stale=True, blind=True, nan=True)
    with pytest.raises(WeightsDiffer, match=r"log-probabilities of probes are not finite \(\d+ of \d+ tokens\)"):
        await theirs.generate([1, 2], PARAMS)
    tell(keeper, stale=True, blind=True)
    with pytest.raises(WeightsDiffer, match=r"log-probabilities of probes differ by up to"):
        await theirs.generate([1, 2], PARAMS)
    await theirs.close()
    with pytest.raises(StaleVersion, match="another client updates this server"):
        await engine.generate([1, 2], PARAMS)
    first = keeper.address
    await engine.load_weights(policies[1], SECOND)
    assert keeper.address != first and "log-probabilities of probes differ" in caplog.text
    assert (await engine.generate([1, 2], PARAMS)).spans == [(SECOND, 0, 8)]
    await engine.close()


async def test_a_dead_server_costs_the_calls_in_flight_and_is_replaced_a_bounded_number_of_times(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies, max_restarts=1)
    await engine.version()
    tell(keeper, hold=2)
    lost = [asyncio.create_task(engine.generate([1, 2], PARAMS)) for _ in range(3)]
    await asyncio.sleep(0.5)
    tell(keeper, die=True)
    for call in await asyncio.gather(*lost, return_exceptions=True):
        assert isinstance(call, EngineUnreachable)
    assert (await engine.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)]
    tell(keeper, die=True)
    for error in (EngineUnreachable, EngineStopped):
        with pytest.raises(error):
            await engine.generate([1, 2], PARAMS)
    with pytest.raises(EngineStopped, match=r"vLLM died 2 times, see engine\.max_restarts"):
        await engine.generate([1, 2], PARAMS)
    await engine.close()


async def test_a_call_of_a_dead_replica_is_repeated_at_another_one_at_once(
    keeper: VllmKeeper, policies: Policies
) -> None:
    await managed(keeper, policies).version()
    replicas = (fake_config(base_url=keeper.address, startup_timeout_s=900), BuiltinConfig(threads=1))
    engine = open_engine(RoutedConfig(kind="routed", replicas=replicas), policies[0], FIRST)
    assert await engine.version() == FIRST
    tell(keeper, die=True)
    async with asyncio.timeout(120):
        while len(engine.serving()) == 2:
            assert (await engine.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)]
    await engine.close()


async def test_what_can_not_be_attributed_is_refused(keeper: VllmKeeper, policies: Policies) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    tell(keeper, unmarked=True)
    with pytest.raises(StaleVersion, match="unmarked tokens are not used"):
        await engine.generate([1, 2], PARAMS)
    with pytest.raises(StaleVersion, match="unmarked tokens are not used"):
        await engine.score([1, 2])
    tell(keeper)
    mark(keeper, "default")
    with pytest.raises(EngineUnreachable, match="was restarted: loading policy"):
        await engine.generate([1, 2], PARAMS)
    assert (await engine.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)], "the next call gives it the policy anew"
    mark(keeper, SECOND)
    with pytest.raises(StaleVersion, match="sampled with bbb"):
        await engine.generate([1, 2], PARAMS)
    await engine.load_weights(policies[1], SECOND)
    mark(keeper, FIRST)
    with pytest.raises(StaleVersion, match="sampled with aaa"):
        await engine.score([1, 2])
    await engine.close()


@pytest.mark.parametrize(
    "moment", ["triplane_load", "triplane_verify", "resume", f"weight_version {SECOND}", f"generate {SECOND}"]
)
async def test_of_two_that_update_one_server_none_takes_the_others_weights_for_its_policy(
    keeper: VllmKeeper, policies: Policies, moment: str
) -> None:
    """The first one's last step, its mark, comes late: at some moment of the second one's update."""
    await managed(keeper, policies).version()
    mark(keeper, "default")
    first = open_engine(fake_config(base_url=keeper.address), policies[0], FIRST)
    second = open_engine(fake_config(base_url=keeper.address), policies[1], SECOND)
    tell(keeper, late=[FIRST, moment])
    late = asyncio.create_task(first.version())
    while not seen(keeper)["waiting"]:
        await asyncio.sleep(0.05)
    before = len(seen(keeper)["resumed"])
    with pytest.raises(StaleVersion, match="another client"):
        for _ in range(2):  # the mark may come once the second has been answered
            assert (await second.generate([1, 2], PARAMS)).spans == [(SECOND, 0, 8)]
    with pytest.raises(StaleVersion, match="updated or restarted by another client"):
        await late
    assert str(HTTP.get(f"{keeper.address}/weight_info", timeout=30).json()["weight_version"]).startswith("unproven:")
    (resumed,) = seen(keeper)["resumed"][before:]
    assert resumed.startswith("unproven:"), "nobody samples with the second's weights under the first's version"
    await first.close()
    await second.close()


async def test_a_server_started_again_before_its_mark_is_not_taken_for_proven(
    keeper: VllmKeeper, policies: Policies
) -> None:
    await managed(keeper, policies).version()
    mark(keeper, "default")
    engine = open_engine(fake_config(base_url=keeper.address), policies[0], FIRST)
    tell(keeper, reborn=True)
    with pytest.raises(StaleVersion, match="updated or restarted by another client"):
        await engine.version()
    tell(keeper)
    assert await engine.version() == FIRST
    await engine.close()


async def test_a_server_taken_by_somebody_else_after_its_probes_is_not_marked(
    keeper: VllmKeeper, policies: Policies
) -> None:
    await managed(keeper, policies).version()
    mark(keeper, "default")
    engine = open_engine(fake_config(base_url=keeper.address), policies[0], FIRST)
    before = len(seen(keeper)["marks"])
    tell(keeper, seized=[SECOND, "triplane_loaded", 2])
    with pytest.raises(StaleVersion, match="updated or restarted by another client"):
        await engine.version()
    assert FIRST not in seen(keeper)["marks"][before:]
    await engine.close()


async def test_a_version_on_weights_that_somebody_else_loaded_is_not_believed(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    await engine.load_weights(policies[1], SECOND)
    mark(keeper, FIRST)
    theirs = open_engine(fake_config(base_url=keeper.address), policies[0], FIRST)
    before = len(seen(keeper)["calls"])
    assert await theirs.version() == FIRST
    assert "collective_rpc  triplane_load" in seen(keeper)["calls"][before:]
    await theirs.close()
    await engine.close()


async def test_a_call_whose_client_is_closed_while_it_waits_to_be_repeated_is_a_fault_of_the_engine() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        client = JsonClient(f"http://127.0.0.1:{probe.getsockname()[1]}", retries=20)
        call = asyncio.create_task(client.call("GET", "/health"))
        await asyncio.sleep(0.5)
        await client.close()
        with pytest.raises(EngineUnreachable, match="was closed: repeat the call"):
            await call


async def test_a_prefix_cache_that_was_not_reset_ends_the_update(keeper: VllmKeeper, policies: Policies) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    tell(keeper, held=True)
    with pytest.raises(EngineError, match="did not reset its prefix cache"):
        await engine.load_weights(policies[1], SECOND)
    tell(keeper)
    assert await engine.version() == FIRST and (await engine.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)]
    await engine.close()


async def test_the_context_bounds_a_turn_and_turns_draw_different_random_numbers(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    completion: Completion = await engine.generate([1] * 253, PARAMS)
    assert len(completion.token_ids) == 3 and completion.finish_reason == "length"
    with pytest.raises(RequestTooLong, match="256"):
        await engine.generate([1] * 256, PARAMS)
    assert mixed_seed(5, 10) != mixed_seed(5, 11) and mixed_seed(2**64 - 1, 3) < 2**63
    await engine.close()


async def test_a_server_that_can_not_start_is_one_line_with_its_last_words(policies: Policies) -> None:
    for config, words in (
        (fake_config(flags=["--port", "-1"]), "vLLM ended while it started: .*OverflowError"),
        (fake_config(python="/nowhere/python"), "engine.python is /nowhere/python"),
        (fake_config(env={}), "vLLM is not installed there"),
    ):
        engine = open_engine(config, policies[0], FIRST)
        with pytest.raises(EngineError, match=words) as caught:
            await engine.version()
        assert "\n" not in str(caught.value)
        await engine.close()


async def test_a_server_of_somebody_else_is_used_again_although_it_was_away_for_too_long(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "RETRY_S", 0.0)
    server = StubServer(policies[0])
    server.start()
    try:
        server.wait()
        engine = open_engine(fake_config(base_url=server.url, startup_timeout_s=0.5), policies[1], SECOND)
        assert await engine.version() == SECOND
        server.stop()
        with pytest.raises(EngineUnreachable):
            await engine.generate([1, 2], PARAMS)
        with pytest.raises(EngineStopped, match="failed its health check"):
            await engine.generate([1, 2], PARAMS)
        await engine.check_failure()
        server.start()
        await asyncio.to_thread(server.wait)
        assert (await engine.generate([1, 2], PARAMS)).spans == [(SECOND, 0, 8)]
        await engine.close()
        with pytest.raises(EngineStopped):
            await engine.version()
    finally:
        server.stop()


async def test_a_server_of_somebody_else_is_waited_for_and_given_the_policy_anew(policies: Policies) -> None:
    port = free_port()
    config = fake_config(base_url=f"http://127.0.0.1:{port}", startup_timeout_s=120)
    command = [
        config.python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(policies[0]),
        "--port",
        str(port),
    ]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, **config.env}, start_new_session=True)

    servers = [start()]
    engine = open_engine(config, policies[1], SECOND)
    try:
        while not (servers[0].poll() or await JsonClient(str(config.base_url)).is_healthy("/health", 5)):
            await asyncio.sleep(0.2)
        assert await engine.version() == SECOND
        servers[0].kill()
        servers[0].wait()
        lost = asyncio.create_task(engine.generate([1, 2], PARAMS))
        await asyncio.sleep(1)
        servers.append(start())
        with pytest.raises(EngineUnreachable):
            await lost
        assert (await engine.generate([1, 2], PARAMS)).spans == [(SECOND, 0, 8)]
    finally:
        await engine.close()
        for server in servers:
            server.kill()
            server.wait()
