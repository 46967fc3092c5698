"""Streams of the engines: pieces in order are the completion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from inference.bridge.turns import parts_of
from inference.engines.base import Completion, Engine, Piece, SamplingParams, StreamsWhole, empty_piece
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.engines.openai import OpenAIEngine
from inference.errors import EngineError, EngineStopped, RequestTooLong
from tests.inference.conftest import write_checkpoint

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], list(range(40))]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("policies")
    return [write_checkpoint(folder / f"p{seed}", seed) for seed in (0, 1)]


async def pieces_of(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[Piece]:
    return [piece async for piece in engine.stream(prompt, params)]


def whole(pieces: Sequence[Piece]) -> Completion:
    """The completion that the pieces are."""
    tokens = [int(token) for piece in pieces for token in piece.token_ids]
    logprobs = [float(value) for piece in pieces for value in piece.logprobs]
    spans: list[tuple[str, int, int]] = []
    place = 0
    for piece in pieces:
        assert [start for _, start, _ in piece.spans] == [0, *(end for _, _, end in piece.spans)][: len(piece.spans)]
        for version, start, end in piece.spans:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], place + end)
            else:
                spans.append((version, place + start, place + end))
        place += len(piece.token_ids)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    reason = pieces[-1].finish_reason
    assert reason is not None
    return Completion(tokens, logprobs, spans, reason)


def test_pieces_of_a_stream_are_the_completion(policies: list[Path]) -> None:
    async def run() -> None:
        engine = BuiltinEngine(policies[0], "v1", threads=1)
        wanted = [
            (prompt, SamplingParams(temperature, 60, seed, (3, 11)))
            for seed, prompt in enumerate(PROMPTS)
            for temperature in (0.0, 1.0)
        ]
        expected = [await engine.generate(*each) for each in wanted]
        found = await asyncio.gather(*(pieces_of(engine, *each) for each in wanted))
        assert [whole(pieces) for pieces in found] == expected
        assert max(map(len, found)) > 1, "tokens come before the end"
        await engine.close()

    asyncio.run(run())


def test_pieces_after_a_reload_have_the_new_version(policies: list[Path]) -> None:
    async def run() -> None:
        engine, pieces = BuiltinEngine(policies[0], "v1", threads=1), []
        async with aclosing(engine.stream([5, 6, 7], SamplingParams(1.0, 200, 3))) as stream:
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) == 1:
                    await engine.load_weights(policies[1], "v2")
        spans = whole(pieces).spans
        assert [version for version, _, _ in spans] == ["v1", "v2"] and spans[-1][2] == 200
        await engine.close()

    asyncio.run(run())


def test_closed_stream_frees_its_place_in_the_batch(policies: list[Path]) -> None:
    async def run() -> None:
        engine = BuiltinEngine(policies[0], "v1", threads=1, max_batch=1)
        async with aclosing(engine.stream([5], SamplingParams(1.0, 250, 3))) as stream:
            await anext(stream)
        # with the only place taken, this one would wait for 250 tokens
        await asyncio.wait_for(engine.generate([5], SamplingParams(1.0, 1, 3)), 5)
        assert engine._scheduler.streamed == 0
        await engine.close()

    asyncio.run(run())


def test_stream_of_a_closed_engine_ends_with_abort_or_an_error(policies: list[Path]) -> None:
    async def run() -> None:
        engine = BuiltinEngine(policies[0], "v1", threads=1)
        stream = engine.stream([5], SamplingParams(1.0, 250, 3))
        pieces = [await anext(stream)]
        await engine.close()
        pieces += [piece async for piece in stream]
        assert pieces[-1].finish_reason == "abort"
        with pytest.raises(EngineStopped):
            await pieces_of(engine, [5], SamplingParams(1.0, 2, 3))

    asyncio.run(run())


def test_stream_refuses_what_generate_refuses_and_routing(policies: list[Path]) -> None:
    async def run() -> None:
        engine = BuiltinEngine(policies[0], "v1", threads=1)
        with pytest.raises(RequestTooLong):
            await pieces_of(engine, [5] * 256, SamplingParams(1.0, 1, 3))
        with pytest.raises(EngineError, match="another policy's tokenizer"):
            await pieces_of(engine, [96], SamplingParams(1.0, 1, 3))
        with pytest.raises(EngineError, match="use generate"):
            await pieces_of(engine, [5], SamplingParams(1.0, 1, 3, routing_from=0))
        with pytest.raises(EngineError, match="use generate"):
            await pieces_of(OpenAIEngine("http://127.0.0.1:1/v1", "p"), [5], SamplingParams(1.0, 1, 3, routing_from=0))
        await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [1e-40, -1.0, float("nan")])
def test_temperature_without_a_distribution_is_refused_and_the_engine_lives(
    policies: list[Path], temperature: float
) -> None:
    async def run() -> None:
        engine = BuiltinEngine(policies[0], "v1", threads=1)
        params = SamplingParams(temperature, 4, 3)
        for call in (engine.generate([5], params), pieces_of(engine, [5], params), engine.score([5, 6], temperature)):
            with pytest.raises(EngineError, match="temperature is"):
                await call
        assert len((await engine.generate([5], SamplingParams(1e-6, 4, 3))).token_ids) == 4
        await engine.close()

    asyncio.run(run())


def test_engine_without_streaming_yields_its_completion_as_one_piece(policies: list[Path]) -> None:
    class Whole(StreamsWhole):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            assert all(type(token) is int for token in prompt_ids), "they become JSON"
            return await engine.generate(prompt_ids, params)

    async def run() -> None:
        params = SamplingParams(1.0, 20, 3)
        expected = await engine.generate([5, 6], params)
        for served in (Whole(), DelegatingEngine(Whole())):  # type: ignore[arg-type]
            (piece,) = await pieces_of(served, np.array([5, 6], np.int32), params)  # type: ignore[arg-type]
            assert whole([piece]) == expected and not served.streams(params)
        await engine.close()

    engine = BuiltinEngine(policies[0], "v1", threads=1)
    asyncio.run(run())


@pytest.mark.parametrize("restricted", [True, False])
def test_a_piece_without_tokens_has_no_parts(restricted: bool) -> None:
    assert parts_of(empty_piece(), "v1", restricted=restricted) == ([], False)
