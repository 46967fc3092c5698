"""A real vLLM on this CPU: what it serves after every update is what the checkpoint says, and what it would serve
otherwise is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from inference.engines import SamplingParams, open_engine
from inference.engines.builtin import BuiltinEngine
from inference.engines.vllm_keeper import VllmKeeper
from inference.engines.vllm_plain import plain_checkpoint
from inference.errors import EngineUnreachable, WeightsDiffer
from tests.inference.conftest import write_checkpoint
from tests.vllm.conftest import HERE, real_config
from tests.vllm.test_server_guard import family, is_alive, until

pytestmark = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.timeout(1800)]
FIRST, SECOND = "a" * 64, "b" * 64
SEQUENCES = [[(seed * 31 + step * 7) % 96 for step in range(40)] for seed in range(6)]
SKIPPED = r"layer 0: experts\.w13, w2 compute something else .*; layer 1: experts\.w13, w2"
BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on a CPU, at most."""


@pytest.fixture(scope="module")
def keeper() -> Iterator[VllmKeeper]:
    """A server whose extension forgets to pack experts again. All it is started with is right."""
    changes = {
        "env": {"PYTHONPATH": str(HERE / "skipping")},
        "flags": ["--worker-extension-cls", "skipping.SkippingExtension"],
    }
    keeper = VllmKeeper(real_config(**changes))
    yield keeper
    keeper.stop()


@pytest.fixture(scope="module")
def sound() -> Iterator[VllmKeeper]:
    """A server as the product starts it."""
    keeper = VllmKeeper(real_config())
    yield keeper
    keeper.stop()


async def reference(directory: Path) -> list[list[float]]:
    engine = BuiltinEngine(directory, "reference", threads=1)
    try:
        return await asyncio.gather(*(engine.score(tokens) for tokens in SEQUENCES))
    finally:
        await engine.close()


def call(keeper: VllmKeeper, path: str, **body: Any) -> Any:
    return httpx.post(f"{keeper.address}{path}", json=body, timeout=600).raise_for_status().json()


def largest_gap(found: list[list[float]], wanted: list[list[float]]) -> float:
    return float((torch.tensor(found) - torch.tensor(wanted)).abs().max())


async def test_after_every_update_log_probabilities_and_tensors_are_the_checkpoints(
    sound: VllmKeeper, policies: tuple[Path, Path], tmp_path: Path
) -> None:
    nudged = nudge(policies[0], tmp_path / "nudged")
    served = {FIRST: policies[0], SECOND: policies[1], "c" * 64: nudged}
    engine = open_engine(real_config(), policies[0], FIRST, sound)
    for version in (FIRST, SECOND, "c" * 64, FIRST, SECOND):
        if await engine.version() != version:
            await engine.load_weights(served[version], version)
        found = await asyncio.gather(*(engine.score(tokens) for tokens in SEQUENCES))
        assert largest_gap(found, await reference(served[version])) < 1e-4
        for other, directory in served.items():
            plain = str(plain_checkpoint(directory, other))
            rpc = call(sound, "/collective_rpc", method="triplane_verify", kwargs={"directory": plain})
            assert (rpc["results"] == [[]]) == (other == version), "one step of one weight is a difference"
        sampled = await engine.generate([5, 6, 7], SamplingParams(1.0, 12, seed=1, stop_token_ids=(3,)))
        assert [span[0] for span in sampled.spans] == [version]
        rescored = (await engine.score([5, 6, 7, *sampled.token_ids]))[3:]
        assert sampled.logprobs == pytest.approx(rescored, abs=1e-4), "sampled log-probabilities are the policy's"
    await engine.close()


def nudge(directory: Path, target: Path) -> Path:
    """The same checkpoint with one element of one norm one float32 step away: far below what any log-probability
    shows.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(str(directory / "model.safetensors"))
    norm = tensors["model.layers.1.post_attention_layernorm.weight"]
    norm[3] = torch.nextafter(norm[3], torch.tensor(9.0))
    target.mkdir()
    save_file(tensors, str(target / "model.safetensors"))
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


async def test_requests_in_flight_keep_the_version_that_made_them(
    sound: VllmKeeper, policies: tuple[Path, Path]
) -> None:
    engine = open_engine(real_config(), policies[0], FIRST, sound)
    await engine.version()
    running = [
        asyncio.create_task(engine.generate([5, 6, 7, seed], SamplingParams(1.0, 200, seed=seed))) for seed in range(6)
    ]
    await asyncio.sleep(0.1)
    await engine.load_weights(policies[1], SECOND)
    done = await asyncio.gather(*running)
    assert {span[0] for each in done for span in each.spans} <= {FIRST, SECOND}
    assert all(len(each.spans) == 1 and each.finish_reason == "length" for each in done)
    assert FIRST in {each.spans[0][0] for each in done}
    await engine.close()


async def test_greedy_tokens_and_temperatures_are_those_really_sampled_from(
    sound: VllmKeeper, policies: tuple[Path, Path]
) -> None:
    engine = open_engine(real_config(), policies[0], FIRST, sound)
    ours = BuiltinEngine(policies[0], FIRST, threads=1)
    params = [SamplingParams(temperature, 16, seed=3) for temperature in (0.0, 0.5, 1.0)]
    greedy, *sampled = await asyncio.gather(*(engine.generate([9, 8, 7], each) for each in params))
    wanted = await ours.generate([9, 8, 7], params[0])
    assert greedy.token_ids == wanted.token_ids
    assert greedy.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    for each, temperature in zip(sampled, (0.5, 1.0), strict=True):
        rescored = await ours.score([9, 8, 7, *each.token_ids], temperature)
        assert each.logprobs == pytest.approx(rescored[3:], abs=1e-4)
    again = await engine.generate([9, 8, 7], params[2])
    assert again.token_ids == sampled[1].token_ids
    await ours.close()
    await engine.close()


async def test_a_stale_prefix_cache_can_not_serve(sound: VllmKeeper, policies: tuple[Path, Path]) -> None:
    """Loading without a reset, as nobody should, shows the danger; the salt alone averts it, and so does the product's
    reset alone.
    """
    prompt = [token % 96 for token in range(BLOCK + 40)]
    engine = open_engine(real_config(), policies[0], FIRST, sound)
    await engine.version()
    greedy = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}

    def sample(salt: str) -> list[float]:
        (choice,) = call(sound, "/inference/v1/generate", token_ids=prompt, sampling_params=greedy, cache_salt=salt)[
            "choices"
        ]
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]

    sample(FIRST)
    call(
        sound,
        "/collective_rpc",
        method="triplane_load",
        kwargs={"directory": str(plain_checkpoint(policies[1], SECOND))},
    )
    stale, salted = sample(FIRST), sample(SECOND)
    ours = BuiltinEngine(policies[1], SECOND, threads=1)
    wanted = (await ours.generate(prompt, SamplingParams(0.0, 8, seed=0))).logprobs
    assert stale != pytest.approx(wanted, abs=1e-3), "the old prefix is still there"
    assert salted == pytest.approx(wanted, abs=1e-4)
    await engine.load_weights(policies[1], SECOND)
    assert sample(FIRST) == pytest.approx(wanted, abs=1e-4)
    await ours.close()
    await engine.close()


async def test_a_skipped_expert_repack_is_refused_by_name(
    keeper: VllmKeeper, policies: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = open_engine(real_config(), policies[0], FIRST, keeper)
    await engine.version()
    address = keeper.address
    theirs = open_engine(real_config(base_url=address), policies[1], SECOND)
    with pytest.raises(WeightsDiffer, match=SKIPPED):
        await theirs.version()
    call(keeper, "/collective_rpc", method="triplane_blind")
    with pytest.raises(WeightsDiffer, match="log-probabilities of probes differ"):
        await theirs.generate([1, 2], SamplingParams(1.0, 4, seed=0))
    await theirs.close()
    await engine.load_weights(policies[1], SECOND)
    assert keeper.address != address, "our own server is started again"
    found = await asyncio.gather(*(engine.score(tokens) for tokens in SEQUENCES))
    assert largest_gap(found, await reference(policies[1])) < 1e-4
    await engine.close()


def test_random_policies_differ(tmp_path: Path) -> None:
    """What the tests above tell apart is really different."""
    both = [asyncio.run(reference(write_checkpoint(tmp_path / str(seed), seed))) for seed in (0, 1)]
    assert max(abs(a - b) for a, b in zip(*map(itertools.chain.from_iterable, both), strict=True)) > 1.0


async def test_vllm_ends_with_its_guard_and_with_its_run(sound: VllmKeeper, policies: tuple[Path, Path]) -> None:
    engine = open_engine(real_config(), policies[0], FIRST, sound)
    await engine.version()
    guard = guard_of(sound)
    members = [pid for pid in family(guard) if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(members) >= 4, "guard, server, engine, worker"
    os.kill(guard, signal.SIGKILL)
    assert until(lambda: not any(is_alive(pid) for pid in members)), members
    with pytest.raises(EngineUnreachable):
        await engine.generate([1, 2], SamplingParams(1.0, 4, seed=0))
    assert (await engine.generate([1, 2], SamplingParams(1.0, 4, seed=0))).spans == [(FIRST, 0, 4)], "started again"
    members = family(guard_of(sound))
    sound.stop()
    assert not any(is_alive(pid) for pid in members)
    await engine.close()


def guard_of(keeper: VllmKeeper) -> int:
    """The child of this process that guards the keeper's server."""
    port = str(keeper.address).rpartition(":")[2].encode()
    return next(
        pid
        for pid in family(os.getpid())
        if b"server_guard" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and port in line
    )
