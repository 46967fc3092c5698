"""What the router knows of caches from events, at gaps, restarts and its cap, and from its own decisions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import RouterError
from inference.router import Batch, Cleared, Fingerprinter, Namespace, Removed, Stored
from inference.router.index import PrefixIndex
from inference.router.residency import Replay, Residency
from tests.inference.reference_router import Prefix, ReferenceCaches

SIZE = 2
HASHER = Fingerprinter(SIZE)
ROOT = Namespace("policy").value
BLOCK = st.sampled_from([[0, 0], [0, 0], [0, 0], [0, 0], [0, 1]])
PROMPT = st.lists(BLOCK, max_size=8).map(lambda blocks: [token for block in blocks for token in block])
"""Few different blocks, so that prompts share prefixes and are prefixes of each other."""


class Caches:
    """Residency of two replicas with events."""

    def __init__(self, capacity: int = 1000, replay: Replay | None = None) -> None:
        self.index = PrefixIndex(capacity)
        self.residency = Residency(self.index, HASHER, capacity=capacity, lifetime_s=10.0)
        for place in range(2):
            self.residency.add(f"r{place}", place, ROOT, replay)

    def depth(self, tokens: list[int], replica: int, assumed: bool = False, namespace: int = ROOT) -> int:
        bit = 1 << 2 * replica + assumed
        depths = self.index.depths(HASHER.prefixes(tokens, namespace))
        return next((depth for depth, mask in depths if mask & bit), 0)

    def assume(self, tokens: list[int], now: float) -> None:
        hashes = HASHER.prefixes(tokens, ROOT)
        self.residency.assume("r0", hashes, self.index.depths(hashes), now)


def names(tokens: list[int], replica: int = 0) -> list[tuple[int, Prefix]]:
    """An engine's own hashes of the blocks of a prompt."""
    return [(replica, tuple(tokens[:end])) for end in range(SIZE, len(tokens) + 1, SIZE)]


def stored(tokens: list[int], start: int = 0, replica: int = 0) -> Stored:
    blocks = names(tokens, replica)
    parent = blocks[start - 1] if start else None
    return Stored(blocks[start:], parent, tokens[start * SIZE : len(blocks) * SIZE], SIZE)


EVENT = st.tuples(st.sampled_from(["stored", "removed", "cleared"]), st.integers(0, 1), PROMPT, st.integers(0, 4))


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=20))
def test_depths_after_events_are_those_of_the_engines(events: list[tuple[str, int, list[int], int]]) -> None:
    caches, engines, sequence = Caches(), ReferenceCaches(SIZE), [0, 0]
    seen: list[list[int]] = []
    for what, replica, tokens, start in events:
        seen.append(tokens)
        prefixes = engines.prefixes(tokens)
        start = min(start, len(prefixes))
        event: Stored | Removed | Cleared
        if what == "stored":
            if start and prefixes[start - 1] not in engines.held.get(replica, ()):
                start = 0  # an engine stores a block after one that it has
            event = stored(tokens, start, replica)
            engines.store(replica, prefixes[start:])
        elif what == "removed":
            event = Removed(names(tokens, replica)[start:])
            engines.remove(replica, prefixes[start:])
        else:
            event = Cleared()
            engines.held.pop(replica, None)
        caches.residency.apply(f"r{replica}", Batch(sequence[replica], [event]))
        sequence[replica] += 1
        for prompt in seen:
            exact = engines.depths(prompt)
            assert [caches.depth(prompt, each) for each in (0, 1)] == [exact.get(each, 0) for each in (0, 1)]
    for each in (0, 1):
        caches.residency.clear(f"r{each}")
    assert len(caches.index) == 0 and caches.residency._pairs == 0


def test_gap_is_replayed() -> None:
    log = [Batch(0, [stored([1, 1])]), Batch(1, [stored([1, 1, 2, 2], 1)]), Batch(2, [stored([5, 5])])]
    asked = []

    def replay(first: int, last: int) -> list[Batch]:
        asked.append((first, last))
        return log[first:]

    caches = Caches(replay=replay)
    caches.residency.apply("r0", log[0])
    caches.residency.apply("r0", log[2])
    assert asked == [(1, 1)] and caches.residency.counters.lost == 0
    assert caches.depth([1, 1, 2, 2], 0) == 2 and caches.depth([5, 5], 0) == 1


@pytest.mark.parametrize("replayed", [[], [Batch(2, [stored([7, 7])])]])
def test_gap_that_is_not_replayed_clears_the_replica_alone(replayed: list[Batch]) -> None:
    caches = Caches(replay=lambda first, last: replayed)
    for replica in (0, 1):
        caches.residency.apply(f"r{replica}", Batch(0, [stored([1, 1, 2, 2], replica=replica)]))
    caches.residency.apply("r0", Batch(3, [stored([1, 1, 2, 2, 3, 3], 2), stored([4, 4])]))
    assert caches.depth([1, 1, 2, 2], 0) == 0 and caches.depth([1, 1, 2, 2], 1) == 2
    assert caches.depth([4, 4], 0) == 1 and caches.depth([7, 7], 0) == 0
    assert caches.residency.counters.lost == 2 and caches.residency.counters.orphans == 1
    caches.residency.apply("r0", Batch(4, [stored([1, 1])]))
    assert caches.depth([1, 1], 0) == 1


def test_late_batches_are_ignored_and_a_restart_clears() -> None:
    caches = Caches()
    for sequence, tokens in enumerate([[1, 1], [2, 2], [3, 3]]):
        caches.residency.apply("r0", Batch(sequence, [stored(tokens)]))
    caches.residency.apply("r0", Batch(1, [Removed(names([3, 3]))]))
    assert caches.depth([3, 3], 0) == 1 and caches.residency.counters.late == 1
    caches.residency.apply("r0", Batch(0, [stored([4, 4])]))
    assert caches.depth([3, 3], 0) == 0 and caches.depth([4, 4], 0) == 1
    caches.residency.apply("r0", Batch(1, [stored([5, 5])]))
    assert caches.depth([5, 5], 0) == 1


def test_unknown_blocks_are_ignored_and_counted() -> None:
    caches = Caches()
    caches.residency.apply("r0", Batch(0, [Removed(["nobody", 3]), stored([1, 1, 2, 2], 1), stored([6, 6])]))
    assert caches.residency.counters.orphans == 1 and caches.depth([6, 6], 0) == 1 and len(caches.index) == 1


@pytest.mark.parametrize(
    "event", [Stored(["a"], None, [1, 1, 1, 1], 4), Stored(["a", "b"], None, [1, 1], 2), Stored([], None, [1], 2)]
)
def test_other_block_size_is_one_clear_error_and_loses_nothing(event: Stored) -> None:
    caches = Caches()
    caches.residency.apply("r0", Batch(0, [stored([1, 1])]))
    with pytest.raises(RouterError, match=r"r0 sent .* the router's blocks have 2: set the router's block_tokens"):
        caches.residency.apply("r0", Batch(1, [stored([2, 2]), event]))
    caches.residency.apply("r0", Batch(2, [stored([3, 3])]))
    assert [caches.depth([n, n], 0) for n in (1, 2, 3)] == [1, 1, 1] and caches.residency.counters.lost == 0


def test_unknown_replica_is_named() -> None:
    with pytest.raises(RouterError, match="no replica 'r9'"):
        Caches().residency.apply("r9", Batch(0, []))


def test_blocks_of_an_earlier_policy_are_not_found_under_a_later_one() -> None:
    caches, later = Caches(), Namespace("later").value
    caches.residency.apply("r0", Batch(0, [stored([1, 1])]))
    caches.residency.serve("r0", later)
    caches.residency.apply("r0", Batch(1, [Cleared(), stored([2, 2])]))
    assert caches.depth([1, 1], 0, namespace=later) == 0 == caches.depth([1, 1], 0)
    assert caches.depth([2, 2], 0, namespace=later) == 1 and caches.depth([2, 2], 0) == 0


def test_engine_hashes_are_bounded() -> None:
    caches = Caches(capacity=8)
    for sequence in range(100):
        caches.residency.apply(f"r{sequence % 2}", Batch(sequence // 2, [stored([sequence] * 6, replica=sequence % 2)]))
        assert caches.residency._pairs <= 32 and len(caches.index) <= 8
    assert caches.depth([99] * 6, 1) == 3


def test_assumptions_end_after_their_lifetime_unless_prolonged() -> None:
    caches = Caches()
    short, long = [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
    caches.assume(short, 0.0)
    caches.assume(long, 5.0)
    caches.residency.expire(10.0)
    assert caches.depth(long, 0, assumed=True) == 3
    caches.assume(short, 12.0)
    caches.residency.expire(15.0)
    assert caches.depth(long, 0, assumed=True) == 2
    caches.residency.expire(22.0)
    assert len(caches.index) == 0


def test_a_block_that_is_dropped_is_not_assumed_any_more() -> None:
    caches, prompt = Caches(), [1, 1, 2, 2, 3, 3]
    caches.assume(prompt, 0.0)
    caches.residency.apply("r0", Batch(0, [Removed(names(prompt)[1:])]))
    assert caches.depth(prompt, 0, assumed=True) == 3, "it was not stored yet"
    caches.residency.apply("r0", Batch(1, [stored(prompt), Removed(names(prompt)[2:])]))
    assert caches.depth(prompt, 0) == caches.depth(prompt, 0, assumed=True) == 2
    caches.assume(prompt, 1.0)
    assert caches.depth(prompt, 0, assumed=True) == 3
    caches.residency.apply("r0", Batch(2, [Removed(names(prompt)[:1])]))
    assert caches.depth(prompt, 0, assumed=True) == 0
    caches.residency.apply("r0", Batch(3, [Cleared()]))
    assert len(caches.index) == 0


def test_assumptions_survive_eviction_between_choice_and_record() -> None:
    caches = Caches(capacity=3)
    caches.assume([1, 1, 2, 2], 0.0)
    hashes = HASHER.prefixes([1, 1, 2, 2, 3, 3], ROOT)
    depths = caches.index.depths(hashes)
    caches.assume([8] * 6, 0.0)
    caches.residency.assume("r0", hashes, depths, 1.0)
    assert caches.depth([1, 1, 2, 2, 3, 3], 0, assumed=True) == 3
    caches.residency.assume("r0", np.empty(0, np.uint64), [], 1.0)
