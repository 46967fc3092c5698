"""The routing that the built-in engine returns is that of the forward pass, also where it reuses earlier state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.routing import Routes
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.probes import score_rows
from inference.engines.requests import Answer, Request
from inference.engines.scheduler import CHUNK, Scheduler
from inference.engines.weights import read_weights

pytestmark = pytest.mark.anyio


def params(tokens: int, seed: int = 0, routing_from: int | None = 0) -> SamplingParams:
    return SamplingParams(1.0, tokens, seed, (), routing_from)


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(96) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def expected(policy: Path, tokens: list[int]) -> Routes:
    """Routing of every position but the last, read at once."""
    _, chosen = score_rows(read_weights(policy), torch.tensor([tokens]))
    return chosen[0].permute(1, 0, 2).numpy()[:-1].astype(np.uint8)


def check(policy: Path, prompt: list[int], found: Completion, start: int = 0) -> None:
    wanted = expected(policy, prompt + found.token_ids)[start:]
    assert found.routed_experts is not None and found.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(found.routed_experts, wanted)


async def test_every_position_that_was_fed_has_its_experts(policy: Path) -> None:
    engine, asked = BuiltinEngine(policy, "v1", threads=1, prefix_bytes=0), prompts(12)
    found = await asyncio.gather(*(engine.generate(each, params(5 + row, row)) for row, each in enumerate(asked)))
    plain = await engine.generate(asked[0], params(5, 0, None))
    await engine.close()
    for prompt, completion in zip(asked, found, strict=True):
        check(policy, prompt, completion)
    assert plain.routed_experts is None and plain == found[0]


async def test_reused_state_leaves_no_hole(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1", threads=1)
    prompt = prompts(1)[0]
    await engine.generate(prompt, params(8, 1, None))  # keeps its state without routing
    first = await engine.generate(prompt, params(8, 1))
    check(policy, prompt, first)
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    turns = [await engine.generate(longer, params(6, 2, start)) for start in (0, len(prompt) + 7)]
    group = await asyncio.gather(*(engine.generate(longer[::-1], params(4, seed)) for seed in range(5)))
    await engine.close()
    check(policy, longer, turns[0])
    check(policy, longer, turns[1], start=len(prompt) + 7)
    for each in group:
        check(policy, longer[::-1], each)


async def test_a_prompt_longer_than_a_chunk_is_recorded_whole(write_policy: Callable[..., Path]) -> None:
    policy = write_policy("long", max_position_embeddings=1024)
    prompt = [(7 * index) % 96 for index in range(700)]
    engine = BuiltinEngine(policy, "v1", threads=1)
    found = await asyncio.gather(engine.generate(prompt, params(4)), engine.generate(prompt[:30], params(4)))
    await engine.close()
    check(policy, prompt, found[0])
    check(policy, prompt[:30], found[1])


async def test_after_a_hot_reload_positions_keep_the_experts_they_were_sampled_with(
    policy: Path, other_policy: Path
) -> None:
    engine, asked = BuiltinEngine(policy, "v1", threads=1), prompts(12)
    calls = [asyncio.create_task(engine.generate(each, params(200, seed))) for seed, each in enumerate(asked)]
    await asyncio.sleep(0.1)
    await engine.load_weights(other_policy, "v2")
    completions = await asyncio.gather(*calls)
    await engine.close()
    assert any(len(found.spans) == 2 for found in completions)
    for prompt, found in zip(asked, completions, strict=True):
        assert found.routed_experts is not None
        assert len(found.routed_experts) == len(prompt) + len(found.token_ids) - 1
        for _, _, end in [span for span in found.spans if span[0] == "v1"]:
            fed = len(prompt) + end - 1
            np.testing.assert_array_equal(found.routed_experts[:fed], expected(policy, prompt + found.token_ids)[:fed])


async def test_after_a_hot_reload_what_the_old_policy_did_not_sample_has_the_experts_of_the_new_one(
    write_policy: Callable[..., Path],
) -> None:
    old, new = (write_policy(f"v{seed}", seed=seed, max_position_embeddings=1024) for seed in (1, 2))
    found: list[Completion] = []
    scheduler = Scheduler(
        read_weights(old), "v1", max_batch=4, prefix_bytes=1 << 30, deliver=lambda _, made: found.append(made)
    )
    loop, chance = asyncio.get_running_loop(), random.Random(4)
    short, long = ([chance.randrange(96) for _ in range(count)] for count in (20, CHUNK + 20))

    def begin(prompt: list[int]) -> None:
        scheduler.waiting.append(Request("generate", np.array(prompt), params(6), Answer(loop), loop))
        scheduler.step()

    def finish() -> None:
        while not scheduler.idle:
            scheduler.step()

    with torch.inference_mode():
        begin(short)  # samples a token of the old policy
        begin(long)  # reads a part of its prompt
        scheduler.reload(read_weights(new), "v2")
        finish()
        later = [*short, *found[0].token_ids, 7]
        begin(later)  # could begin with the kept state of the first
        finish()
    assert [[version for version, _, _ in each.spans] for each in found] == [["v1", "v2"], ["v2"], ["v2"]]
    check(new, long, found[1])
    check(new, later, found[2])
