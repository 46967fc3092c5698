"""GPUs between leases: a server sleeps or stops, and serves only after its policy was loaded and verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.engines import SamplingParams, VllmConfig, open_engine
from inference.engines.builtin import BuiltinEngine
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_keeper import VllmKeeper
from inference.errors import EngineError, WeightsDiffer
from tests.http_client import HTTP
from tests.vllm.conftest import fake_config

pytestmark = pytest.mark.anyio
FIRST, SECOND = "a" * 64, "b" * 64
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)
Policies = tuple[Path, Path]


@pytest.fixture(scope="module")
def kept() -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(fake_config(idle="sleep"))
    yield keeper
    keeper.stop()


@pytest.fixture
def keeper(kept: VllmKeeper) -> VllmKeeper:
    """Of one server for all tests, without faults."""
    if kept.address is not None:
        HTTP.post(f"{kept.address}/fault", json={}, timeout=30)
    return kept


def ask(keeper: VllmKeeper, path: str) -> Any:
    return HTTP.get(f"{keeper.address}{path}", timeout=30).json()


def managed(keeper: VllmKeeper, policies: Policies, index: int = 0, **changes: object) -> VllmEngine:
    return open_engine(fake_config(idle="sleep", **changes), policies[index], (FIRST, SECOND)[index], keeper)


async def test_sleeping_server_wakes_in_order_and_serves_the_next_policy(
    keeper: VllmKeeper, policies: Policies
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    await engine.close()
    address = keeper.address
    await keeper.give_back()
    assert ask(keeper, "/is_sleeping") == {"is_sleeping": True}
    assert ask(keeper, "/weight_info")["weight_version"].startswith("unproven:asleep:")
    before = len(ask(keeper, "/seen")["calls"])
    engine = managed(keeper, policies, 1)
    assert (await engine.generate([1, 2, 3], PARAMS)).spans == [(SECOND, 0, 8)]
    calls = [call for call in ask(keeper, "/seen")["calls"][before:] if not call.startswith("inference")]
    assert calls[:6] == [
        "pause mode=wait",
        "update_weight_version",
        "wake_up tags=weights",
        "collective_rpc  triplane_load",
        "wake_up tags=kv_cache",
        "reset_prefix_cache",
    ]
    assert keeper.address == address, "the same server"
    reference = BuiltinEngine(policies[1], SECOND, threads=1)
    assert await engine.score([5, 6, 7]) == pytest.approx(await reference.score([5, 6, 7]), abs=1e-4)
    await reference.close()
    await engine.close()


async def test_policy_that_was_served_before_sleep_is_loaded_again(keeper: VllmKeeper, policies: Policies) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    await keeper.give_back()
    await engine.close()
    engine = managed(keeper, policies)
    assert await engine.version() == FIRST
    assert ask(keeper, "/seen")["calls"].count("wake_up tags=weights") >= 1
    reference = BuiltinEngine(policies[0], FIRST, threads=1)
    assert await engine.score([5, 6, 7]) == pytest.approx(await reference.score([5, 6, 7]), abs=1e-4)
    await reference.close()
    await engine.close()


async def test_server_that_was_woken_by_somebody_else_is_not_believed(keeper: VllmKeeper, policies: Policies) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    await engine.close()
    await keeper.give_back()
    HTTP.post(f"{keeper.address}/wake_up", timeout=30)
    assert ask(keeper, "/is_sleeping") == {"is_sleeping": False}
    engine = managed(keeper, policies)
    assert (await engine.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)]
    reference = BuiltinEngine(policies[0], FIRST, threads=1)
    assert await engine.score([5, 6, 7]) == pytest.approx(await reference.score([5, 6, 7]), abs=1e-4)
    await reference.close()
    await engine.close()


async def test_woken_server_with_wrong_weights_is_refused(keeper: VllmKeeper, policies: Policies) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    await engine.close()
    await keeper.give_back()
    HTTP.post(f"{keeper.address}/fault", json={"stale": True}, timeout=30)
    theirs = open_engine(fake_config(idle="sleep", base_url=keeper.address), policies[0], FIRST)
    with pytest.raises(WeightsDiffer):
        await theirs.version()
    await theirs.close()


async def test_server_of_ours_that_does_not_sleep_is_stopped(
    keeper: VllmKeeper, policies: Policies, caplog: pytest.LogCaptureFixture
) -> None:
    engine = managed(keeper, policies)
    await engine.version()
    await engine.close()
    HTTP.post(f"{keeper.address}/fault", json={"sleepless": True}, timeout=30)
    there = VllmKeeper(fake_config(idle="sleep", base_url=keeper.address))
    with pytest.raises(EngineError, match="start it with --enable-sleep-mode, or set"):
        await there.give_back()
    await keeper.give_back()
    assert keeper.address is None and "stopping vLLM, which did not go to sleep" in caplog.text


@pytest.mark.slow
async def test_idle_stop_ends_the_server_and_keep_leaves_it(policies: Policies) -> None:
    keeper = VllmKeeper(fake_config(idle="stop"))
    engine = open_engine(fake_config(idle="stop"), policies[0], FIRST, keeper)
    await engine.version()
    await engine.close()
    await keeper.give_back()
    assert keeper.address is None
    with pytest.raises(ValueError, match="is not started here: use sleep or keep"):
        VllmConfig(idle="stop", base_url="http://host:8000")
    still = VllmKeeper(fake_config())
    engine = open_engine(fake_config(), policies[0], FIRST, still)
    await engine.version()
    await engine.close()
    await still.give_back()
    assert still.address is not None and ask(still, "/is_sleeping") == {"is_sleeping": False}
    still.stop()
