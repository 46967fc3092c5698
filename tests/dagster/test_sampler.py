"""Leases: the built-in engine is kept and reloaded, a server at an address is given the policy that is asked for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dagster_world import World

from contracts.artifacts import Artifact, ArtifactWriter, open_artifact
from contracts.store import LocalStore, Store
from inference.engines.base import Completion, SamplingParams
from inference.engines.config import BuiltinConfig, EngineConfig, OpenAIConfig
from resources.refs import require_ref
from resources.sampler import SamplerResource
from tests.ports import free_port

PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)


@pytest.fixture(scope="module")
def policies(ran: World) -> tuple[Artifact, Artifact]:
    """The base policy and one trained from it."""
    base = require_ref(ran.store, ran.experiment.name, "base_policy")
    candidate = require_ref(ran.store, ran.experiment.name, "checkpoint", "0001")
    return open_artifact(ran.store, base), open_artifact(ran.store, candidate)


@pytest.fixture
def address(policies: tuple[Artifact, Artifact]) -> Iterator[str]:
    """A server of the base policy."""
    listen = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "inference",
        "serve",
        "--policy",
        str(policies[0].directory()),
        "--listen",
        listen,
        "--threads",
        "1",
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://{listen}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield f"http://{listen}/v1"
    finally:
        child.terminate()
        child.wait(30)


def sample(sampler: SamplerResource, policy: Artifact, config: EngineConfig) -> Completion:
    async def once() -> Completion:
        async with sampler.lease(policy, "rollouts", config) as engine:
            assert await engine.version() == policy.ref.digest
            return await engine.generate([5, 6, 7, 8], PARAMS)

    return asyncio.run(once())


def with_shorter_context(policy: Artifact, store: Store) -> Artifact:
    """The same weights for half as many positions, as a checkpoint."""
    config = json.loads(policy.path("config.json").read_text())
    config["max_position_embeddings"] //= 2
    with ArtifactWriter(store, "checkpoint", "f" * 64, parents={}, config={}, code_version="1") as out:
        for name in policy.names():
            out.add_bytes(
                name, json.dumps(config).encode() if name == "config.json" else policy.path(name).read_bytes()
            )
        return out.commit()


def test_a_policy_of_another_architecture_gets_another_engine(
    policies: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    sampler, config = SamplerResource(), BuiltinConfig(threads=1)
    smaller = with_shorter_context(policies[0], LocalStore(tmp_path))
    try:
        first, other, again = (sample(sampler, each, config) for each in (policies[0], smaller, policies[0]))
    finally:
        sampler.close()
    assert first.token_ids == other.token_ids == again.token_ids
    assert first.logprobs == other.logprobs == again.logprobs


def test_a_lease_serves_the_policy_it_names_whatever_was_served_before(policies: tuple[Artifact, Artifact]) -> None:
    sampler, config = SamplerResource(), BuiltinConfig(threads=1)
    try:
        first, second, again = (sample(sampler, policies[index], config) for index in (0, 1, 0))
    finally:
        sampler.close()
    assert first == again and first.logprobs != second.logprobs
    assert [first.spans[0][0], second.spans[0][0]] == [policy.ref.digest for policy in policies]


def test_an_engine_that_has_stopped_is_replaced_by_the_next_lease(policies: tuple[Artifact, Artifact]) -> None:
    sampler, config = SamplerResource(), BuiltinConfig(threads=1)

    async def stop() -> None:
        async with sampler.lease(policies[0], "rollouts", config) as engine:
            await engine.close()

    try:
        before = sample(sampler, policies[0], config)
        for policy in policies:
            asyncio.run(stop())
            after = sample(sampler, policy, config)
        assert after.spans[0][0] == policies[1].ref.digest
        asyncio.run(stop())
        assert sample(sampler, policies[0], config) == before
    finally:
        sampler.close()


@pytest.mark.slow
def test_a_server_by_address_gives_the_same_tokens(policies: tuple[Artifact, Artifact], address: str) -> None:
    sampler, near = SamplerResource(), BuiltinConfig(threads=1)
    far = OpenAIConfig(base_url=address)
    try:
        for index in (0, 1):
            here, there = (sample(sampler, policies[index], config) for config in (near, far))
            assert here.token_ids == there.token_ids
            assert here.logprobs == pytest.approx(there.logprobs, abs=1e-6)
    finally:
        sampler.close()
