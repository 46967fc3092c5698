"""The client of SGLang against a server that speaks its API over our own forward pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from curation.tokenizer import train_tokenizer
from inference.engines import RoutedConfig, SamplingParams, SglangConfig, open_engine
from inference.engines.builtin import BuiltinEngine
from inference.engines.sglang import SglangEngine
from inference.errors import EngineError, EngineStopped, RequestTooLong, StaleVersion, WeightsDiffer
from tests.inference.conftest import write_checkpoint
from tests.inference.sglang_server import LONGEST, SglangServer, serving

pytestmark = pytest.mark.anyio
FIRST, SECOND = "a" * 64, "b" * 64
SIZE = 400
ELEMENTS = [{"type": "token", "token": token} for token in (20, 21)]
TAG = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": ELEMENTS}})
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


@pytest.fixture
def server(folders: tuple[Path, Path]) -> Iterator[SglangServer]:
    with serving(folders[0]) as state:
        yield state


def opened(server: SglangServer, folder: Path, version: str = FIRST, **changes: object) -> SglangEngine:
    settings = {"base_url": server.address, "unmatched": "warn", "tolerance": 1e-3, "retries": 1, **changes}
    return open_engine(SglangConfig.model_validate({"kind": "sglang", **settings}), folder, version)


async def test_tokens_and_scores_are_those_of_the_policy(server: SglangServer, folders: tuple[Path, Path]) -> None:
    engine, reference = opened(server, folders[1], SECOND), BuiltinEngine(folders[1], SECOND, threads=1)
    for temperature, stops in ((1.0, ()), (0.7, (3, 5)), (0.0, ())):
        params = SamplingParams(temperature, 12, seed=2**62 + 1, stop_token_ids=stops)
        found, wanted = await engine.generate([1, 2, 3], params), await reference.generate([1, 2, 3], params)
        assert (found.token_ids, found.spans) == (wanted.token_ids, [(SECOND, 0, len(found.token_ids))])
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert found.finish_reason == wanted.finish_reason
    assert await engine.score([5, 6, 7]) == pytest.approx(await reference.score([5, 6, 7]), abs=1e-4)
    with pytest.raises(EngineError, match="temperature 1 only"):
        await engine.score([5, 6], 0.5)
    await engine.close()
    await reference.close()


@pytest.mark.parametrize("grammar", [None, pytest.param(TAG, marks=pytest.mark.slow)])
async def test_what_tokens_were_drawn_from_is_what_the_server_says(tmp_path: Path, grammar: str | None) -> None:
    folder = write_checkpoint(tmp_path / "policy", 0, vocab_size=SIZE)
    (folder / "tokenizer.json").write_text(train_tokenizer(["def f(x): return x + 1\n"] * 9, [], SIZE).to_str())
    with serving(folder) as server:
        engine, reference = opened(server, folder), BuiltinEngine(folder, FIRST, threads=1)
        params = SamplingParams(0.8, 12, 3, (3,), top_p=1.0 if grammar else 0.6, grammar=grammar)
        found, wanted = await engine.generate([1, 2], params), await reference.generate([1, 2], params)
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-6)
        assert found.supports is not None and wanted.supports is not None and wanted.log_mass is not None
        places = np.arange(len(found.token_ids))
        np.testing.assert_array_equal(found.supports.masks(places, SIZE), wanted.supports.masks(places, SIZE))
        if grammar is None:
            assert found.log_mass == pytest.approx(wanted.log_mass, abs=1e-6)
        else:
            assert found.log_mass is None and found.token_ids[:2] == [20, 21]
        greedy = await engine.generate([1, 2], replace(params, temperature=0.0))
        assert greedy.supports is not None and greedy.logprobs == [0.0] * len(greedy.token_ids)
        engine._widest = 0
        with pytest.raises(EngineError, match=r"use SGLang 0\.5\.23 or later"):
            await engine.generate([1, 2], params)
        engine._widest = 1024
        server.forges = True
        with pytest.raises(EngineError, match=r"record of what .* tokens were drawn from leaves out the token at 1"):
            await engine.generate([1, 2], params)
        with pytest.raises(EngineError, match="sample it from the start"):
            await engine.generate([1, 2, 20], replace(params, grammar=TAG, begun=1))
        await engine.close()
        await reference.close()


async def test_an_update_pauses_loads_proves_and_only_then_names_the_version(
    server: SglangServer, folders: tuple[Path, Path]
) -> None:
    engine = opened(server, folders[0])
    assert await engine.version() == FIRST
    before = len(server.calls)
    await engine.load_weights(folders[1], SECOND)
    made = [(path, body) for path, body in server.calls[before:] if path != "/generate"]
    assert [path for path, _ in made] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/update_weight_version",
    ]
    assert made[1][1]["weight_version"].startswith(f"unproven:{SECOND}:") and made[1][1]["flush_cache"] is True
    assert await engine.version() == server.version == SECOND
    salts = {body["cache_salt"] for path, body in server.calls if path == "/generate"}
    assert all(salt.startswith("probe of unproven:") for salt in salts), "probes share no cache with a policy"
    await engine.generate([1], PARAMS)
    assert server.calls[-1][1]["cache_salt"] == SECOND
    await engine.close()


@pytest.mark.slow
async def test_a_request_in_flight_ends_with_its_weights_or_is_aborted(
    server: SglangServer, folders: tuple[Path, Path]
) -> None:
    engine = opened(server, folders[0])
    await engine.version()
    server.hold_s = 0.5
    flying = asyncio.create_task(engine.generate([1, 2], PARAMS))
    await asyncio.sleep(0.1)
    await engine.load_weights(folders[1], SECOND)
    assert (await flying).spans == [(FIRST, 0, 8)]
    await engine.close()

    hasty = opened(server, folders[1], SECOND, drain_s=0)
    await hasty.version()
    flying = asyncio.create_task(hasty.generate([1, 2], PARAMS))
    await asyncio.sleep(0.1)
    await hasty.load_weights(folders[0], FIRST)
    aborted = await flying
    assert (aborted.finish_reason, aborted.token_ids, aborted.spans) == ("abort", [], [])
    assert (await hasty.generate([1, 2], PARAMS)).spans == [(FIRST, 0, 8)]
    await hasty.close()


async def test_the_models_end_of_sequence_is_a_token_unless_the_request_stops_there(
    server: SglangServer, folders: tuple[Path, Path]
) -> None:
    engine, reference = opened(server, folders[0]), BuiltinEngine(folders[0], FIRST, threads=1)
    free = (await reference.generate([4], SamplingParams(1.0, 12, seed=3))).token_ids
    server.end_of_sequence = free[4]
    other = next(token for token in range(96) if token not in free)
    for stops in ((), (other,), (other, free[6])):
        params = SamplingParams(1.0, 12, seed=3, stop_token_ids=stops)
        found, wanted = await engine.generate([4], params), await reference.generate([4], params)
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert found.spans == [(FIRST, 0, len(found.token_ids))]
    await engine.close()
    await reference.close()


async def test_a_completion_in_parts_keeps_its_policy_while_another_is_loaded(
    server: SglangServer, folders: tuple[Path, Path]
) -> None:
    engine, reference = opened(server, folders[0]), BuiltinEngine(folders[0], FIRST, threads=1)
    free = (await reference.generate([4], SamplingParams(1.0, 12, seed=3))).token_ids
    await reference.close()
    await engine.version()
    server.end_of_sequence, server.hold_s = free[4], 0.3
    other = next(token for token in range(96) if token not in free)
    flying = asyncio.create_task(engine.generate([4], SamplingParams(1.0, 12, 3, (other,))))
    await asyncio.sleep(0.1)
    await engine.load_weights(folders[1], SECOND)
    assert ((await flying).token_ids, (await flying).spans) == (free, [(FIRST, 0, 12)])
    salts = [body["cache_salt"] for path, body in server.calls if path == "/generate"]
    ours = [salt for salt in salts if not salt.startswith("probe of")]
    assert len(ours) > 1 and set(ours) == {FIRST}
    await engine.close()


async def test_wrong_weights_and_unreadable_ones_are_refused_by_name(
    server: SglangServer, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = opened(server, folders[0])
    await engine.version()
    server.stale = True
    with pytest.raises(WeightsDiffer, match=r"does not serve policy bbbbbbbbbbbb .* probes differ by up to"):
        await engine.load_weights(folders[1], SECOND)
    assert server.version.startswith("unproven:"), "what is not proven carries no version"
    server.stale = False
    assert (await engine.generate([1], PARAMS)).spans == [(FIRST, 0, 8)], "the next request loads the former one again"
    await engine.close()

    far = write_checkpoint(tmp_path / "far", 2)
    lost = opened(server, far, "c" * 64)
    await lost.version()
    (far / "config.json").unlink()
    server.restart()
    with pytest.raises(EngineError, match="was restarted"):
        await lost.generate([1], PARAMS)
    with pytest.raises(EngineError, match=r"Failed to get model config.*must read .*far under this path"):
        await lost.generate([1], PARAMS)
    await lost.close()


async def test_a_restarted_server_loads_the_policy_again(server: SglangServer, folders: tuple[Path, Path]) -> None:
    engine = opened(server, folders[1], SECOND)
    await engine.version()
    server.restart()
    with pytest.raises(EngineError, match="was restarted: loading policy bbbbbbbbbbbb again"):
        await engine.generate([1], PARAMS)
    assert (await engine.generate([1], PARAMS)).spans == [(SECOND, 0, 8)]
    await engine.close()


async def test_another_clients_policy_is_never_taken_for_ours(server: SglangServer, folders: tuple[Path, Path]) -> None:
    ours, theirs = opened(server, folders[0]), opened(server, folders[1], SECOND)
    await ours.version()
    await theirs.version()
    with pytest.raises(StaleVersion, match=r"sampled with bbbbbbbb.*one server per client"):
        await ours.generate([1], PARAMS)
    assert (await ours.generate([1], PARAMS)).spans == [(FIRST, 0, 8)], "it loads its own again"
    with pytest.raises(StaleVersion, match="scored with aaaa"):
        await theirs.score([1, 2])
    await ours.close()
    await theirs.close()


async def test_prompts_that_are_too_long_a_server_without_seeds_and_one_that_is_away(
    server: SglangServer, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server.deterministic = False
    engine = opened(server, folders[0])
    with pytest.raises(RequestTooLong, match=f"prompt has {LONGEST} tokens, the server accepts {LONGEST - 1}"):
        await engine.generate([1] * LONGEST, PARAMS)
    assert "start it with --enable-deterministic-inference" in caplog.text
    whole = await engine.generate([1] * (LONGEST - 1), SamplingParams(1.0, 100, seed=1))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 6)
    await engine.close()
    with pytest.raises(EngineStopped, match="the engine is closed"):
        await engine.generate([1], PARAMS)
    away = open_engine(
        SglangConfig(kind="sglang", base_url="http://127.0.0.1:9", startup_timeout_s=0.1, unmatched="warn"),
        folders[0],
        FIRST,
    )
    with pytest.raises(EngineStopped, match=r"127\.0\.0\.1:9/ready has not answered for 0\.1 s: start SGLang there"):
        await away.generate([1], PARAMS)
    await away.close()


async def test_two_servers_stand_behind_a_router(server: SglangServer, folders: tuple[Path, Path]) -> None:
    with serving(folders[0]) as second:
        common = {"kind": "sglang", "unmatched": "warn", "tolerance": 1e-3}
        replicas = [{**common, "base_url": each.address} for each in (server, second)]
        config = RoutedConfig.model_validate({"kind": "routed", "replicas": replicas})
        engine = open_engine(config, folders[1], SECOND)
        made = await asyncio.gather(*(engine.generate([1, token], PARAMS) for token in range(8)))
        assert {tuple(each.spans) for each in made} == {((SECOND, 0, 8),)}
        assert server.version == second.version == SECOND
        await engine.load_weights(folders[0], FIRST)
        assert (await engine.generate([1], PARAMS)).spans == [(FIRST, 0, 8)]
        assert server.version == second.version == FIRST
        await engine.close()


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("sglang", "base_url", "gpu-1:30000"),
        ("sglang", "base_url", "http://a:1,http://b:2"),
        ("sglang", "base_url", "htp://a"),
        ("trtllm", "address", "http://a:1"),
        ("trtllm", "address", "dns:servers:1"),
        ("trtllm", "address", "nowhere"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(kind: str, setting: str, value: str) -> None:
    with pytest.raises(ValidationError, match=rf"engine\.{setting}"):
        RoutedConfig.model_validate({"kind": "routed", "replicas": [{"kind": kind, setting: value}]})
