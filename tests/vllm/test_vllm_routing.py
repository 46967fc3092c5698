"""Routed experts of a vLLM server. The stub writes them as vLLM 0.32 does: `routed_experts`, base64 of a NumPy file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.engines import SamplingParams, open_engine
from inference.engines.probes import score_rows
from inference.engines.vllm_keeper import VllmKeeper
from inference.engines.weights import read_weights
from inference.errors import EngineError
from tests.http_client import HTTP
from tests.vllm.conftest import fake_config

FIRST = "a" * 64
PROMPT = [1, 2, 3, 4]
Policies = tuple[Path, Path]
FLAGS = {"flags": ["--enable-return-routed-experts"]}


@pytest.fixture(scope="module")
def keeper() -> Iterator[VllmKeeper]:
    keeper = VllmKeeper(fake_config(**FLAGS))
    yield keeper
    keeper.stop()


@pytest.mark.anyio
async def test_the_experts_of_a_reply_are_those_of_the_checkpoint(keeper: VllmKeeper, policies: Policies) -> None:
    engine = open_engine(fake_config(**FLAGS), policies[0], FIRST, keeper)
    whole = await engine.generate(PROMPT, SamplingParams(1.0, 5, 3, routing_from=0))
    later = await engine.generate(PROMPT, SamplingParams(1.0, 5, 3, routing_from=3))
    plain = await engine.generate(PROMPT, SamplingParams(1.0, 5, 3))
    _, chosen = score_rows(read_weights(policies[0]), torch.tensor([PROMPT + whole.token_ids]))
    assert whole.routed_experts is not None and later.routed_experts is not None
    np.testing.assert_array_equal(whole.routed_experts, chosen[0].permute(1, 0, 2)[:-1])
    np.testing.assert_array_equal(later.routed_experts, whole.routed_experts[3:])
    assert plain.routed_experts is None
    for text in ("%%%", "AAAA"):
        HTTP.post(f"{keeper.address}/fault", json={"routes": text}, timeout=30)
        with pytest.raises(EngineError, match="vLLM's routed experts can't be read"):
            await engine.generate(PROMPT, SamplingParams(1.0, 5, 3, routing_from=0))
    HTTP.post(f"{keeper.address}/fault", json={}, timeout=30)
    await engine.close()


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_server_without_the_flag_returns_none(policies: Policies) -> None:
    engine = open_engine(fake_config(), policies[0], FIRST)
    found = await engine.generate(PROMPT, SamplingParams(1.0, 5, 3, routing_from=0))
    await engine.close()
    assert found.routed_experts is None
