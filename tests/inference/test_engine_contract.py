"""What every engine promises (inference/engines/base.py), one session for each kind. vLLM is the real one (make
test-vllm); SGLang and TensorRT-LLM are programs that speak their interface over our own forward pass.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from inference.engines import (
    BuiltinConfig,
    Engine,
    OpenAIConfig,
    RoutedConfig,
    SamplingParams,
    SglangConfig,
    open_engine,
)
from inference.engines.builtin import BuiltinEngine
from inference.engines.vllm import VllmEngine
from inference.errors import EngineError, RequestTooLong
from tests.inference.conftest import write_checkpoint
from tests.inference.sglang_server import serving
from tests.inference.test_trtllm_engine import opened as open_trtllm
from tests.vllm.conftest import real_config

pytestmark = pytest.mark.anyio
FIRST, SECOND = "a" * 64, "b" * 64
PROMPT = [1, 2, 3]
NEAR = 1e-4
"""Servers of float32 copies may sum in another order."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("policies")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPLANE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


@contextmanager
def builtin(folder: Path) -> Iterator[Engine]:
    yield open_engine(BuiltinConfig(threads=1), folder, FIRST)


@contextmanager
def routed(folder: Path) -> Iterator[Engine]:
    yield open_engine(RoutedConfig(kind="routed", replicas=(BuiltinConfig(threads=1),) * 2), folder, FIRST)


@contextmanager
def openai(folder: Path) -> Iterator[Engine]:
    command = [sys.executable, "-m", "inference", "serve", "--policy", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"at (http://\S+/v1)", process.stdout.readline())
        assert found
        engine = open_engine(OpenAIConfig(base_url=found[1]), folder, FIRST)
        asyncio.run(open_engine(OpenAIConfig(base_url=found[1]), folder, FIRST).load_weights(folder, FIRST))
        yield engine
        process.terminate()


@contextmanager
def vllm(folder: Path) -> Iterator[Engine]:
    yield open_engine(real_config(), folder, FIRST)


@contextmanager
def sglang(folder: Path) -> Iterator[Engine]:
    with serving(folder) as server:
        settings = SglangConfig(kind="sglang", base_url=server.address, unmatched="warn", tolerance=1e-3)
        yield open_engine(settings, folder, FIRST)


@contextmanager
def trtllm(folder: Path) -> Iterator[Engine]:
    yield open_trtllm(folder)


Opener = Callable[[Path], AbstractContextManager[Engine]]
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (openai, trtllm)]
"""Their servers are processes, which take seconds to start."""
ENGINES = [builtin, routed, sglang, *SLOW, pytest.param(vllm, marks=pytest.mark.vllm)]


@pytest.fixture(params=ENGINES, ids=lambda each: each.__name__)
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Engine]:
    opened: Opener = request.param
    with opened(folders[0]) as found:
        yield found


async def test_an_engine_keeps_its_promises(engine: Engine, folders: tuple[Path, Path]) -> None:
    first, second = (BuiltinEngine(folder, "reference", threads=1) for folder in folders)
    assert await engine.version() == FIRST

    many = await asyncio.gather(*(engine.generate(PROMPT, SamplingParams(1.0, 9, seed)) for seed in range(6)))
    assert len({tuple(each.token_ids) for each in many}) > 1, "seeds matter"
    for made in many:
        assert (len(made.token_ids), made.spans, made.finish_reason) == (9, [(FIRST, 0, 9)], "length")
        scored = await engine.score([*PROMPT, *made.token_ids])
        assert scored[0] == 0.0
        assert scored == pytest.approx(await first.score([*PROMPT, *made.token_ids]), abs=NEAR)
        assert made.logprobs == pytest.approx(scored[len(PROMPT) :], abs=NEAR), "of the distribution that was sampled"

    stop = many[0].token_ids[4]
    ended = await engine.generate(PROMPT, SamplingParams(1.0, 9, 0, (stop,)))
    until = many[0].token_ids.index(stop) + 1
    assert (ended.token_ids, ended.finish_reason) == (many[0].token_ids[:until], "stop"), "the stop token is kept"

    greedy = [await engine.generate(PROMPT, SamplingParams(0.0, 6, seed)) for seed in range(2)]
    assert greedy[0].token_ids == greedy[1].token_ids
    assert greedy[0].logprobs == pytest.approx(
        (await first.score([*PROMPT, *greedy[0].token_ids]))[len(PROMPT) :], abs=NEAR
    )

    try:
        nucleus = await engine.generate(PROMPT, SamplingParams(1.0, 9, 0, top_p=0.5))
    except EngineError as error:
        assert "does not return what tokens were drawn from" in str(error)
    else:
        whole = (await first.score([*PROMPT, *nucleus.token_ids]))[len(PROMPT) :]
        assert nucleus.supports is not None and nucleus.supports.fault(np.array(nucleus.token_ids), 96) is None
        assert all(own > other + 0.1 for own, other in zip(nucleus.logprobs, whole, strict=True)), "renormalized"

    pieces = [piece async for piece in engine.stream(PROMPT, SamplingParams(1.0, 9, 0))]
    assert [int(token) for piece in pieces for token in piece.token_ids] == many[0].token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    if isinstance(engine, VllmEngine):
        assert [len(piece.token_ids) for piece in pieces] == [0, 9], "it tells when it begins"

    with pytest.raises(RequestTooLong):
        await engine.generate([1] * 256, SamplingParams(1.0, 4, 0))
    lost = asyncio.create_task(engine.generate(PROMPT, SamplingParams(1.0, 200, 0)))
    await asyncio.sleep(0.01)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)

    await engine.load_weights(folders[1], SECOND)
    assert await engine.version() == SECOND
    after = await engine.generate(PROMPT, SamplingParams(1.0, 9, 0))
    assert after.spans == [(SECOND, 0, 9)]
    assert after.logprobs == pytest.approx((await second.score([*PROMPT, *after.token_ids]))[len(PROMPT) :], abs=NEAR)

    await engine.close()
    await engine.close()
    with pytest.raises(EngineError):
        await engine.generate(PROMPT, SamplingParams(1.0, 4, 0))
    for each in (first, second):
        await each.close()
