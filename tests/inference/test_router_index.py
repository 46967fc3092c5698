"""The router's fingerprints and index, compared with sets of token tuples."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import RouterError
from inference.router.fingerprint import Chain, Fingerprinter, Namespace
from inference.router.index import PrefixIndex, _Run
from tests.inference.reference_router import ReferenceCaches

SIZE = 2
HASHER = Fingerprinter(SIZE)
ROOT = Namespace("policy").value
BLOCK = st.sampled_from([[0, 0], [0, 0], [0, 0], [0, 0], [0, 1]])
PROMPT = st.lists(BLOCK, max_size=8).map(lambda blocks: [token for block in blocks for token in block])
"""Few different blocks, so that prompts share prefixes and are prefixes of each other."""


def keys(tokens: list[int]) -> list[int]:
    return [int(key) for key in HASHER.prefixes(tokens, ROOT)]


def as_dict(depths: list[tuple[int, int]]) -> dict[int, int]:
    return {place: depth for depth, mask in depths for place in range(mask.bit_length()) if mask >> place & 1}


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=70), st.integers(1, 9), st.lists(st.integers(0, 30), max_size=8))
def test_chain_hashes_as_a_whole_prompt(tokens: list[int], size: int, cuts: list[int]) -> None:
    hasher = Fingerprinter(size)
    chain = Chain(hasher, ROOT)
    for cut in sorted(cuts):
        assert chain.follow(tokens[:cut])
    assert chain.follow(np.array(tokens, np.int64))
    whole = hasher.prefixes(tokens, ROOT)
    assert chain.hashes.tolist() == whole.tolist() and chain.tokens == len(tokens)
    assert len(whole) == len(tokens) // size


def test_prefixes_differ_by_tokens_order_depth_and_namespace() -> None:
    prompts = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 3, 4], [0, 0, 0, 0], [0, 0], [1, 2]]
    found = [HASHER.prefixes(prompt, namespace)[-1] for prompt in prompts for namespace in (ROOT, Namespace("b").value)]
    assert len(set(found)) == len(found)
    namespaces = [Namespace("a", "b"), Namespace("ab"), Namespace("a", "", "b"), Namespace("a", "b", salt="c")]
    assert len({each.value for each in namespaces}) == len(namespaces)


def test_hashes_are_exact_sums() -> None:
    for size in (3, 4):
        hasher = Fingerprinter(size, key="secret")
        tokens = [5, 0, 199_999, 7, 7, 7, 8, 2**31 - 1]
        total, expected = ROOT, []
        for block in range(len(tokens) // size):
            part = [*tokens[size * block : size * (block + 1)], 0]
            pairs = [low + (high << 32) for low, high in zip(part[::2], part[1::2], strict=False)]
            mixed = int(hasher._shift) + sum(int(a) * pair for a, pair in zip(hasher._pairs, pairs, strict=True))
            mixed %= 1 << 64
            total = (total + int(hasher._blocks[block]) * (mixed ^ mixed >> 32)) % (1 << 64)
            expected.append(total)
        assert hasher.prefixes(tokens, ROOT).tolist() == expected
        assert hasher.prefixes(np.array([1, *tokens], np.int32)[1:], ROOT).tolist() == expected
        assert Fingerprinter(size).prefixes(tokens, ROOT).tolist() != expected
    with pytest.raises(RouterError, match="block_tokens=0"):
        Fingerprinter(0)


def test_chain_refuses_another_prompt() -> None:
    chain = Chain(HASHER, ROOT)
    assert chain.follow([1, 2, 3, 4, 5])
    assert not chain.follow([1, 2, 3, 9, 5, 6]) and not chain.follow([1, 2, 3, 4])
    assert not chain.follow([1, 2, 3, 4, 6, 7])
    assert chain.tokens == 5 and chain.hashes.tolist() == HASHER.prefixes([1, 2, 3, 4], ROOT).tolist()


CHANGE = st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 1), PROMPT, st.integers(0, 7))


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGE, max_size=20), st.lists(PROMPT, max_size=3), st.integers(0, 9))
def test_depths_are_those_of_the_reference(
    changes: list[tuple[str, int, list[int], int]], prompts: list[list[int]], hint: int
) -> None:
    index, reference = PrefixIndex(1000), ReferenceCaches(SIZE)
    for what, holder, tokens, start in changes:
        prefixes = reference.prefixes(tokens)
        start = min(start, len(prefixes))
        chain = keys(tokens)[start:]
        if what == "remove":
            index.remove(chain, 1 << holder)
            reference.remove(holder, prefixes[start:])
        else:
            parent = keys(tokens)[start - 1] if start else None
            known = parent is None or parent in index
            assert index.store(chain, holder, parent) == len(chain) * known
            if known:
                reference.store(holder, prefixes[start:])
        prompts.append(tokens)
        for prompt in prompts:
            found = index.depths(HASHER.prefixes(prompt, ROOT))
            assert as_dict(found) == reference.depths(prompt) and all(mask for _, mask in found)
            assert found == index.depths(HASHER.prefixes(prompt, ROOT), hint)
    for holder in range(4):
        index.remove([key for held in reference.held.get(holder, ()) for key in keys(list(held))[-1:]], 1 << holder)
    assert len(index) == 0 and sum(index._held) == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGE, max_size=30), st.sampled_from([6, 1000]))
def test_runs_are_chains_of_blocks_that_the_same_holders_reach(
    changes: list[tuple[str, int, list[int], int]], capacity: int
) -> None:
    index = PrefixIndex(capacity)
    for what, holder, tokens, start in changes:
        chain = keys(tokens)
        if what == "remove":
            index.remove(chain[start:], 1 << holder)
        else:
            index.store(chain[start:], holder, chain[start - 1] if 0 < start < len(chain) else None)
    blocks = defaultdict[_Run, list[int]](list)
    for key, slot in index._slots.items():
        run, parent = index._reach[key], index._parent[slot]
        above = None if parent == -1 else index._reach[index._keys[parent]]
        assert run.holders == index._held[slot] & (-1 if above is None else above.holders)
        assert above is (run.above if index._depth[slot] == run.start + 1 else run)
        blocks[run].append(slot)
    for run, slots in blocks.items():
        depths = {index._depth[slot]: slot for slot in slots}
        assert sorted(depths) == list(range(run.start + 1, run.start + 1 + len(slots)))
        assert depths[max(depths)] == run.last


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), PROMPT), max_size=40), st.integers(1, 12))
def test_index_at_its_cap_tells_nothing_untrue(stored: list[tuple[int, list[int]]], capacity: int) -> None:
    index, reference = PrefixIndex(capacity), ReferenceCaches(SIZE)
    for holder, tokens in stored:
        kept = index.store(keys(tokens), holder)
        reference.store(holder, reference.prefixes(tokens))
        assert kept == min(len(tokens) // SIZE, capacity) and len(index) <= capacity
        found = as_dict(index.depths(HASHER.prefixes(tokens, ROOT)))
        assert found.get(holder, 0) == kept
        exact = reference.depths(tokens)
        assert all(depth <= exact.get(each, 0) for each, depth in found.items())
    assert len(index._keys) <= capacity


def test_least_recently_used_chains_are_evicted_from_their_ends() -> None:
    index = PrefixIndex(6)
    old, used, new = [1, 1, 1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]
    index.store(keys(old), 0)
    index.store(keys(used), 0)
    index.touch(keys(old)[0])
    index.store(keys(new), 0)
    assert index.evicted == 1 and keys(old)[1] in index and keys(old)[2] not in index
    index.store(keys([1, 0, 0, 0]), 0)
    assert keys(old)[0] in index and keys(old)[1] not in index and keys(used)[1] not in index


def test_prefix_is_as_recent_as_what_was_removed_behind_it() -> None:
    index = PrefixIndex(3)
    index.store(keys([1, 1, 1, 1]), 0)
    index.store(keys([2, 2]), 0)
    index.touch(keys([1, 1, 1, 1])[1])
    index.remove(keys([1, 1, 1, 1])[1:], 1)
    index.store(keys([3, 3, 3, 3]), 0)
    assert keys([1, 1])[0] in index and keys([2, 2])[0] not in index


def test_prune_keeps_what_longer_or_kept_prefixes_need() -> None:
    index = PrefixIndex(100)
    short, long, side = keys([1, 1, 2, 2]), keys([1, 1, 2, 2, 3, 3, 4, 4]), keys([1, 1, 5, 5])
    for chain in (short, long, side):
        index.store(chain, 7)
    index.prune(short[-1], 7, lambda key: False)
    assert len(index) == 5
    index.prune(long[-1], 7, {short[-1]}.__contains__)
    assert short[-1] in index and long[2] not in index
    index.prune(short[-1], 7, lambda key: False)
    assert side[-1] in index and short[-1] not in index and short[0] in index
    index.prune(side[-1], 7, lambda key: False)
    assert len(index) == 0


def test_masks_hold_more_holders_than_a_word() -> None:
    index, chain = PrefixIndex(1000), keys([1] * 40)
    drawn = random.Random(1)
    depths = {holder: drawn.randint(1, 20) for holder in range(200)}
    for holder, depth in depths.items():
        index.store(chain[:depth], holder)
    assert as_dict(index.depths(HASHER.prefixes([1] * 40, ROOT))) == depths


def test_prompts_of_equal_hash_have_no_depth_beyond_their_end() -> None:
    index = PrefixIndex(10)
    index.store([11, 12, 13], 0)
    index.store([11, 12], 1)
    assert index.depths(np.array([13], np.uint64)) == [(1, 1), (1, 2)]
