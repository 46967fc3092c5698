"""Episodes that are drawn from part of the vocabulary: supports with every token, through cuts and restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from contracts.chat import ChatTokenizer
from contracts.episodes import TokenRole
from contracts.rpc.listening import Listening
from contracts.supports import Supports, decode_supports, encode_supports, supports_of
from curation.tokenizer import train_tokenizer
from inference.bridge.client import BridgeClient, Episode, Sampling, Turn
from inference.bridge.errors import BadMessage
from inference.bridge.serve import Options, limits_of, serving
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.errors import EngineError
from inference.grammar.tools import tools_grammar
from tests.bridge.bridge_harness import HeldEngine, bridged, builtin_bridge
from tests.bridge.scripted_bridge import looped
from tests.inference.conftest import write_checkpoint

pytestmark = pytest.mark.slow

SIZE = 416
TOP_P = 0.9


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("supports") / "policy", 0, vocab_size=SIZE)
    texts = ['{"name":"read","arguments":{"path":"a.py","start":12}}\n', "def f(x): return x + 1\n"]
    tokenizer = train_tokenizer(texts * 40, ["read", "path", "arguments"], 400)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(policy)


def grammar_of(tokenizer: ChatTokenizer) -> str:
    """Turns that are one call, so that the grammar always restricts them."""
    tag = json.loads(tools_grammar(tokenizer))
    tag["format"] |= {"at_least_one": True, "stop_after_first": True}
    return json.dumps(tag)


def params_of(tokenizer: ChatTokenizer, seed: int, **changes: Any) -> SamplingParams:
    stops = (tokenizer.end_of_turn, tokenizer.pad)
    return SamplingParams(1.2, 60, seed, stops, top_p=TOP_P, grammar=grammar_of(tokenizer), **changes)


def prompt_of(tokenizer: ChatTokenizer) -> list[int]:
    return tokenizer.prompt([("user", "mend it")])


async def streamed(engine: BuiltinEngine, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """The completion that a stream's pieces are."""
    ids, logprobs, forced, numbers, log_mass = list[int](), list[float](), list[bool](), list[Any](), list[float]()
    reason = None
    async for piece in engine.stream(prompt, params):
        assert (
            piece.supports is not None
            and piece.log_mass is not None
            and len(piece.supports.numbers) == len(piece.token_ids)
        )
        ids += piece.token_ids.tolist()
        logprobs += piece.logprobs.tolist()
        forced += piece.forced or [False] * len(piece.token_ids)
        log_mass += piece.log_mass
        numbers += list(piece.supports.masks(np.arange(len(piece.token_ids)), SIZE))
        reason = piece.finish_reason
    assert reason is not None
    return Completion(ids, logprobs, [("v1", 0, len(ids))], reason, None, supports_of(numbers), forced, log_mass)


def masks(supports: Supports | None, count: int) -> list[list[bool]]:
    assert supports is not None
    found: list[list[bool]] = supports.masks(np.arange(count), SIZE).tolist()
    return found


@looped
async def test_stream_is_the_completion_and_goes_on_from_any_token(policy: Path, tokenizer: ChatTokenizer) -> None:
    engine, prompt = BuiltinEngine(policy, "v1", threads=1), prompt_of(tokenizer)
    for seed in range(4):
        params = params_of(tokenizer, seed)
        whole = await engine.generate(prompt, params)
        forced = whole.forced or [False] * len(whole.token_ids)
        count = len(whole.token_ids)
        for cut in sorted({0, 1, 2, count // 2, count - 1}):
            rest = replace(params, begun=cut, max_tokens=params.max_tokens - cut)
            found = await streamed(engine, [*prompt, *whole.token_ids[:cut]], rest)
            assert (found.token_ids, found.logprobs) == (whole.token_ids[cut:], whole.logprobs[cut:])
            assert (found.finish_reason, found.forced) == (whole.finish_reason, forced[cut:])
            assert whole.log_mass is not None and found.log_mass == whole.log_mass[cut:]
            assert masks(found.supports, count - cut) == masks(whole.supports, count)[cut:]
    with pytest.raises(EngineError, match="not one that the grammar begins with"):
        await engine.generate([*prompt, tokenizer.end_of_turn], params_of(tokenizer, 0, begun=1))
    await engine.close()


async def start(client: BridgeClient, tokenizer: ChatTokenizer, seed: int) -> Episode:
    stops = (tokenizer.end_of_turn, tokenizer.pad)
    sampling = Sampling(temperature=1.2, max_tokens=60, seed=seed, stop_token_ids=stops)
    return await client.start(
        prompt_of(tokenizer), sampling=sampling, top_p=TOP_P, grammar=grammar_of(tokenizer), group_id="g"
    )


def content(turn: Turn) -> tuple[Any, ...]:
    assert turn.supports is not None and turn.forced is not None and turn.log_mass is not None
    return (
        *(turn.token_ids.tolist(), turn.logprobs.tolist(), turn.forced.tolist(), turn.log_mass.tolist()),
        masks(turn.supports, len(turn.token_ids)),
    )


@looped
async def test_turns_and_record_have_what_the_engine_drew_from(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    async with builtin_bridge(policy, tmp_path) as (_, server, engine), BridgeClient(server.address) as client:
        episode = await start(client, tokenizer, 3)
        turns = [await episode.step(), await episode.step([5, 6])]
        context = prompt_of(tokenizer)
        for turn in turns:
            context += turn.observation_ids.tolist()
            whole = await engine.generate(context, params_of(tokenizer, 3))
            forced = whole.forced or [False] * len(whole.token_ids)
            supports = masks(whole.supports, len(whole.token_ids))
            assert content(turn) == (whole.token_ids, whole.logprobs, forced, whole.log_mass, supports)
            context += whole.token_ids
        assert any(turn.forced is not None and turn.forced.any() for turn in turns)
        record = await episode.end(reward=1.0)
    source = pa.BufferReader(record.data)
    (row,) = pa.ipc.open_stream(source).read_all().to_pylist()
    (sequence,) = pa.ipc.open_stream(source).read_all().to_pylist()
    recorded = decode_supports(sequence["supports"])
    assert recorded.fault(np.array(sequence["token_ids"]), SIZE) is None
    roles, logprobs = np.array(sequence["token_role"]), sequence["logprobs"]
    own = np.isin(roles, (TokenRole.POLICY, TokenRole.FORCED))
    assert (recorded.numbers[~own] == -1).all() and row["policy_tokens"] == (roles == TokenRole.POLICY).sum()
    assert [value is None for value in logprobs] == (roles != TokenRole.POLICY).tolist()
    seen = recorded.masks(np.flatnonzero(own), SIZE).tolist()
    assert seen == [each for turn in turns for each in masks(turn.supports, len(turn.token_ids))]


@looped
async def test_a_restarted_bridge_goes_on_in_the_middle_of_a_call(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    socket = Listening(f"unix:{tmp_path / 'b.sock'}")
    options = Options(socket, journal=tmp_path / "journal")

    async def play(client: BridgeClient, seed: int) -> list[tuple[Any, ...]]:
        episode = await start(client, tokenizer, seed)
        for _ in range(3):
            await episode.step([7] if episode.turns else [])
        await episode.check()
        found = [content(turn) for turn in episode.turns]
        await episode.end()
        return found

    async with BridgeClient(socket.address) as client:
        async with serving(engine, limits_of(policy), options):
            undisturbed = [await play(client, seed) for seed in range(4)]
        held = HeldEngine(engine, hold_after=6)
        async with serving(held, limits_of(policy), options) as server:
            playing = [asyncio.create_task(play(client, seed)) for seed in range(4)]
            while server.sessions.running < 4 or any(
                each.turns[-1].tokens < 6 for each in server.sessions._episodes.values() if each.is_open
            ):
                await asyncio.sleep(0.01)
        async with serving(engine, limits_of(policy), options) as server:
            assert await asyncio.gather(*playing) == undisturbed
    size = sum(path.stat().st_size for path in (tmp_path / "journal").glob("*.journal"))
    assert size < 8 * 60_000, "a grammar of 20 kB an episode is packed"
    await engine.close()


@looped
async def test_what_can_not_be_followed_is_refused_at_the_start(
    policy: Path, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    prompt = prompt_of(tokenizer)
    tag = '{"type":"structural_tag","format":{"type":"grammar","grammar":"root ::= root"}}'
    async with builtin_bridge(policy, tmp_path) as (_, server, _), BridgeClient(server.address) as client:
        for fields, words in (
            ({"top_p": 1.5}, "top_p=1.5"),
            ({"top_p": float("nan")}, "top_p=nan"),
            ({"grammar": "root ::="}, "is not JSON"),
            ({"grammar": "[1]"}, "not a JSON object"),
            ({"grammar": " " * (1 << 20) + "{}"}, "at most"),
            ({"grammar": '{"type":"structural_tag","format":{"type":"nope"}}'}, "does not compile"),
            ({"grammar": tag}, "grammar: "),
        ):
            stops = (tokenizer.end_of_turn,)
            with pytest.raises(BadMessage, match=words):
                await client.start(prompt, sampling=Sampling(stop_token_ids=stops), **fields)
        with pytest.raises(BadMessage, match="stop_token_ids"):
            await client.start(prompt, grammar=grammar_of(tokenizer))
        assert server.sessions.open == 0


class Untold(DelegatingEngine):
    """An engine that restricts its sampling, and does not tell to what."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return replace(await self.inner.generate(prompt_ids, params), supports=None)


@looped
async def test_an_engine_without_supports_is_refused(policy: Path, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    async with bridged(Untold(engine), limits_of(policy), tmp_path) as (_, server):
        async with BridgeClient(server.address) as client:
            with pytest.raises(BadMessage, match="does not tell"):
                await client.start(prompt_of(tokenizer), top_p=0.5)
            free = await client.start(prompt_of(tokenizer), sampling=Sampling(max_tokens=3))
            assert (await free.step()).supports is None
    await engine.close()


def test_part_of_a_record_is_that_of_its_tokens() -> None:
    rows = [None, np.array([True, False, True]), np.array([False, True, False]), None, np.array([True, False, True])]
    whole = supports_of(rows)
    for first in range(5):
        for last in range(first, 6):
            part = decode_supports(encode_supports(whole.between(first, last)))
            assert encode_supports(part) == encode_supports(supports_of(rows[first:last]))
