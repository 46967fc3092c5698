"""Guessed tokens change no token, log probability, routing or end; only the number of passes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.drafts import Drafts

pytestmark = pytest.mark.anyio
Call = tuple[list[int], SamplingParams]
Undrafted = dict[float, tuple[list[Completion], int]]
"""By top_p: answers without drafts, and the passes that they took."""


@pytest.fixture(scope="module")
def undrafted() -> Undrafted:
    return {}


def calls(count: int, *, stops: tuple[int, ...] = (), top_p: float = 1.0) -> list[Call]:
    """Requests that are easy to guess: of a sharp policy, some with one prompt, which repeats itself."""
    chance = random.Random(count)
    prompts = [[chance.randrange(96) for _ in range(chance.randint(1, 9))] * 4 for _ in range(count // 2 + 1)]
    return [
        (
            chance.choice(prompts),
            SamplingParams(
                *(chance.choice([0.0, 0.1, 0.3, 1.0]), chance.randint(1, 80), chance.getrandbits(62), stops, 0),
                top_p=top_p,
            ),
        )
        for _ in range(count)
    ]


async def answers(engine: BuiltinEngine, wanted: list[Call], at_once: int) -> list[Completion]:
    gate = asyncio.Semaphore(at_once)

    async def ask(call: Call) -> Completion:
        async with gate:
            return await engine.generate(*call)

    return list(await asyncio.gather(*map(ask, wanted)))


def require_same(found: list[Completion], expected: list[Completion]) -> None:
    assert found == expected
    for own, other in zip(found, expected, strict=True):
        assert own.routed_experts is not None and other.routed_experts is not None
        np.testing.assert_array_equal(own.routed_experts, other.routed_experts)


@pytest.mark.parametrize("at_once", [1, 2, 4, 7, 24])
@pytest.mark.parametrize("top_p", [1.0, 0.7])
async def test_drafts_change_no_bit(policy: Path, undrafted: Undrafted, at_once: int, top_p: float) -> None:
    wanted = calls(24, stops=(3, 11, 40, 41, 42), top_p=top_p)
    if top_p not in undrafted:
        plain = BuiltinEngine(policy, "v", threads=1, prefix_bytes=0, drafts=False)
        undrafted[top_p] = await answers(plain, wanted, 24), plain.passes
        await plain.close()
    expected, passes = undrafted[top_p]
    drafting = BuiltinEngine(policy, "v", threads=1)
    for _ in range(2):  # the second time it has seen every answer
        require_same(await answers(drafting, wanted, at_once), expected)
    assert passes == sum(len(each.token_ids) for each in expected)
    if at_once <= 4:
        assert drafting.passes < 0.8 * 2 * passes
    await drafting.close()


async def test_a_sequence_that_was_seen_takes_a_fifth_of_the_passes(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v", threads=1)
    call = ([5, 6, 7, 8, 9, 10, 11], SamplingParams(1.0, 160, 3))
    first = await engine.generate(*call)
    before = engine.passes
    assert await engine.generate(*call) == first
    assert engine.passes - before < 160 / 5
    await engine.close()


async def test_drafts_stop_at_the_end_of_the_context(write_policy: Callable[..., Path]) -> None:
    directory = write_policy("short", max_position_embeddings=24)
    engine = BuiltinEngine(directory, "v", threads=1)
    for length in range(1, 24):
        call = (([4, 5, 6] * 8)[:length], SamplingParams(0.1, 40, 1))
        found = [await engine.generate(*call) for _ in range(2)]
        assert found[0] == found[1] and found[0].finish_reason == "length"
        assert length + len(found[0].token_ids) == 24
    await engine.close()


async def test_a_reload_amid_guesses_keeps_versions_and_tokens_apart(policy: Path, other_policy: Path) -> None:
    """After a reload the log probabilities are those of the new weights alone, given the tokens before."""
    engine = BuiltinEngine(policy, "old", threads=1)
    call = ([4, 5, 6, 7], SamplingParams(0.2, 200, 1))
    for _ in range(20):  # a busy machine may end the answer before it has read the weights
        await engine.generate(*call)
        before = engine.passes
        task = asyncio.create_task(engine.generate(*call))
        while engine.passes == before:
            await asyncio.sleep(0.001)
        await engine.load_weights(other_policy, "new")
        found = await task
        if [version for version, start, end in found.spans if end > start] == ["old", "new"]:
            break
        await engine.load_weights(policy, "old")
    else:
        pytest.fail("no reload came amid an answer")
    fresh = BuiltinEngine(other_policy, "new", threads=1, drafts=False)
    ((start, end),) = [(start, end) for version, start, end in found.spans if version == "new"]
    again = await fresh.generate([*call[0], *found.token_ids[:start]], SamplingParams(0.2, end - start, 1))
    assert again.token_ids == found.token_ids[start:end]
    assert again.logprobs == found.logprobs[start:end]
    await engine.close()
    await fresh.close()


def test_the_longest_context_that_was_seen_decides_and_old_ones_go() -> None:
    drafts = Drafts(capacity=40)
    drafts.learn([1, 2, 3, 4, 5, 6, 7, 0, 4, 5, 6, 8], 0)
    assert drafts.guess([1, 2, 3, 4, 5, 6]) == 7
    assert drafts.guess([9, 4, 5, 6]) == 8
    assert drafts.guess([9, 9, 9, 9]) is None and drafts.guess([5]) is None
    drafts.learn(list(range(1000, 1100)), 0)
    assert drafts.guess([9, 4, 5, 6]) == 8  # of the older half
    drafts.learn(list(range(2000, 2100)), 0)
    assert drafts.guess([9, 4, 5, 6]) is None
