"""The built-in engine's prefix cache: what it finds, what it keeps, and the events that it publishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.engines import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.prefix_cache import BLOCK_TOKENS, Prefix, PrefixStore
from inference.router import Batch, Cleared, Namespace, Removed, Router, Stored
from inference.router.residency import Event
from tests.inference.conftest import write_checkpoint

BYTES = 8
"""Of a token's state here."""


def prefix(tokens: list[int]) -> Prefix:
    """State whose numbers are the tokens."""
    state = torch.tensor(tokens, dtype=torch.float32).reshape(1, 1, -1, 1)
    return Prefix(np.array(tokens), (state, -state))


def sequence(blocks: list[int], tail: int) -> list[int]:
    return [token for block in blocks for token in [block] * BLOCK_TOKENS] + [7] * tail


SEQUENCE = st.builds(sequence, st.lists(st.integers(0, 1), max_size=4), st.integers(0, 3)).filter(len)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class GreedyDual:
    """The store's rule, by its definition: while the sequences need too much room, the one of least worth goes.

    Worth is the share of a sequence's tokens that no other one has in whole blocks, and the largest worth that went
    before its last use. Of equal ones the least recently used goes, which may be the one just stored.
    """

    def __init__(self, room: int) -> None:
        self.room, self.gone, self.now = room, 0.0, 0
        self.kept: dict[tuple[int, ...], tuple[float, int]] = {}

    def use(self, tokens: Sequence[int]) -> None:
        self.now += 1
        self.kept[tuple(tokens)] = (self.gone, self.now)

    def put(self, tokens: list[int]) -> None:
        self.use(tokens)
        while sum(map(len, self.kept)) > self.room:
            worth, _, least = min((self.worth(each), self.kept[each][1], each) for each in self.kept)
            self.gone = max(self.gone, worth)
            del self.kept[least]

    def worth(self, tokens: tuple[int, ...]) -> float:
        shared = max((common(tokens, other) for other in self.kept if other != tokens), default=0)
        return self.kept[tokens][0] + 1 - shared // BLOCK_TOKENS * BLOCK_TOKENS / len(tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SEQUENCE), max_size=30), st.integers(40, 400))
def test_finds_the_longest_beginning_and_publishes_what_it_has(calls: list[tuple[bool, list[int]]], room: int) -> None:
    said: list[Event] = []
    store, model, published = PrefixStore(room * BYTES, said.append), GreedyDual(room), dict[int, int]()
    for stores, tokens in calls:
        if stores:
            store.put(prefix(tokens))
            model.put(tokens)
            assert [tuple(entry.prefix.tokens.tolist()) for entry in store._found.values()] == list(model.kept)
        else:
            found = store.longest(np.array(tokens))
            whole = max(
                (len(each) for each in model.kept if common(each, tokens) == len(each) < len(tokens)), default=0
            )
            most = max((min(common(each, tokens), len(tokens) - 1) for each in model.kept), default=0)
            length = max(whole, most // BLOCK_TOKENS * BLOCK_TOKENS)
            assert (0 if found is None else len(found.tokens)) == length
            if found is not None:
                holders = [each for each in model.kept if common(each, tokens) >= length]
                model.use(tokens[:length] if length == whole else holders[0])
                assert found.tokens.tolist() == tokens[: len(found.tokens)]
                assert found.entry[0].flatten().tolist() == [float(token) for token in found.tokens]
                assert found.entry[1].shape[2] == len(found.tokens)
        apply(published, said)
        blocks = {each[:end] for each in model.kept for end in range(BLOCK_TOKENS, len(each) + 1, BLOCK_TOKENS)}
        assert len(published) == len(blocks)


def apply(published: dict[int, int], said: list[Event]) -> None:
    """Keep the depth of each published block; a block follows one that is published."""
    for event in said:
        if isinstance(event, Stored):
            depth = 0 if event.parent is None else published[event.parent]  # type: ignore[index]
            for place, block in enumerate(event.blocks, 1):
                assert isinstance(block, int) and block not in published
                published[block] = depth + place
        elif isinstance(event, Removed):
            for block in event.blocks:
                del published[block]  # type: ignore[arg-type]
        else:
            published.clear()
    said.clear()


def test_evicts_what_others_have_before_what_must_be_computed_again() -> None:
    """Two conversations take turns. Of the earlier turns of each, the last one has everything."""
    turns = [[sequence([talk, *range(10, 10 + turn)], 0) for turn in range(1, 6)] for talk in (1, 2)]
    store = PrefixStore(sum(len(talk[-1]) for talk in turns) * BYTES + 3 * BLOCK_TOKENS * BYTES)
    for each in turns[0] + turns[1]:  # by age alone the first conversation would be gone
        store.put(prefix(each))
    for talk in turns:
        found = store.longest(np.array([*talk[-1], 3]))
        assert found is not None and len(found.tokens) == len(talk[-1])


def test_unused_entries_go_first_among_equal_ones() -> None:
    store = PrefixStore(3 * 2 * BLOCK_TOKENS * BYTES)
    for name in (1, 2, 3):
        store.put(prefix(sequence([name, name], 0)))
    assert store.longest(np.array(sequence([1, 1], 1))) is not None
    store.put(prefix(sequence([4, 4], 0)))
    assert store.longest(np.array(sequence([2, 2], 1))) is None
    assert store.longest(np.array(sequence([1, 1], 1))) is not None


def test_an_entry_of_great_worth_ages_until_it_goes() -> None:
    store = PrefixStore(3 * 2 * BLOCK_TOKENS * BYTES)
    store.put(prefix(sequence([9, 9], 0)))
    for name in range(10, 16):  # half of each is in the others
        store.put(prefix(sequence([1, name], 0)))
    assert store.longest(np.array(sequence([9, 9], 1))) is None


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_router_knows_what_the_engine_has(tmp_path: Path) -> None:
    policy, other = write_checkpoint(tmp_path / "policy", 0), write_checkpoint(tmp_path / "other", 1)
    router, loop = Router(Namespace("v1")), asyncio.get_running_loop()
    router.add("here")
    batches: list[Batch] = []

    def publish(batch: Batch) -> None:
        batches.append(batch)
        loop.call_soon_threadsafe(router.apply, "here", batch)

    engine = BuiltinEngine(policy, "v1", threads=1, publish=publish)
    prompt = [token % 90 for token in range(40)]
    made = await engine.generate(prompt, SamplingParams(1.0, 20, 3))
    await engine.version()
    turn = prompt + made.token_ids
    cached = (len(turn) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    await until(lambda: router.choose([*turn, 1, 2], max_tokens=1).cached == cached)
    assert router.choose([*prompt[:32], 91, 92], max_tokens=1).cached == 32
    await engine.load_weights(other, "v2")
    await engine.generate([5], SamplingParams(1.0, 1, 3))
    await engine.close()
    assert isinstance(batches[1].events[0], Cleared)
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    await until(lambda: router.choose([*turn, 1, 2], max_tokens=1).cached == 0)


@pytest.mark.anyio
async def test_a_prompt_that_shares_a_part_gets_the_same_bits(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "policy", 0)
    reusing, plain = BuiltinEngine(policy, "v", threads=1), BuiltinEngine(policy, "v", threads=1, prefix_bytes=0)
    start = [token % 90 for token in range(50)]
    for index in range(6):
        prompt = [*start[: 20 + 5 * index], index, 3, 4, *start[:30]]
        wanted = SamplingParams(1.0, 12, index)
        assert await reusing.generate(prompt, wanted) == await plain.generate(prompt, wanted)
    await reusing.close()
    await plain.close()
