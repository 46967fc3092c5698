"""KV prefix cache of one engine: keys and values of finished sequences.

A prompt that begins as a cached sequence does computes only the rest. Sequences match whole, or up to the end of one of
their blocks. What is stored and dropped is published block by block, as other engines do.

Eviction is by cost, as GreedyDual does (Young, 1994): an entry is worth its tokens that no other entry has, since only
those would be computed again, divided by its size. Each use adds the worth of what was evicted last, so that unused
entries age. Of equal ones the least recently used goes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from contracts.routing import Routes
from inference.router.residency import Cleared, Event, Removed, Stored

BLOCK_TOKENS = 16
"""Tokens of a block."""
_FACTOR = np.uint64(0x5851F42D4C957F2D)
_Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Prefix:
    """Cached state of one token sequence."""

    tokens: npt.NDArray[np.int64]
    entry: tuple[Tensor, Tensor]
    routes: Routes | None = None
    """Routing of every token, if it was recorded."""

    @property
    def size(self) -> int:
        """Bytes of keys, values and routing."""
        state = sum(part.numel() * part.element_size() for part in self.entry)
        return state + (0 if self.routes is None else self.routes.nbytes)

    def begin(self, length: int) -> Prefix:
        """State of the first `length` tokens; shares memory with this one."""
        keys, values = self.entry
        routes = None if self.routes is None else self.routes[:length]
        return Prefix(self.tokens[:length], (keys[:, :, :length], values[:, :, :length]), routes)


@dataclass
class _Entry:
    prefix: Prefix
    blocks: list[int]
    """Hashes of its whole blocks, first to last."""
    floor: float
    """What was evicted last at its last use."""
    used: int
    """Time of its last use, in calls."""


class PrefixStore:
    """Bounded map from token prefix to Prefix. Hits are verified token by token. Belongs to one thread."""

    def __init__(self, capacity: int, publish: Callable[[Event], None] | None = None) -> None:
        """capacity: bytes. publish: gets an event for what is stored, dropped and cleared."""
        self._capacity, self._publish = capacity, publish
        self._size = self._now = 0
        self._floor = 0.0
        self._found: dict[int, _Entry] = {}
        self._lengths: Counter[int] = Counter()
        self._holders: dict[int, dict[int, None]] = {}
        """Hash of a block -> the entries that begin with the prefix that ends there."""
        self._queue: list[tuple[float, int, int]] = []
        """Heap of (worth, last use, entry); an entry used since stands here again."""
        self._powers = np.ones(0, np.uint64)

    @property
    def enabled(self) -> bool:
        """Whether the capacity is above 0."""
        return self._capacity > 0

    def put(self, prefix: Prefix) -> None:
        """Add `prefix`, and drop those that cost least to compute again beyond the capacity."""
        hashes = self._hashes(prefix.tokens)
        key = hashes.item(len(hashes) - 1)
        blocks = hashes[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].tolist()
        if key in self._found:
            self._size -= self._found[key].prefix.size
            self._found[key].prefix = prefix
        else:
            self._found[key] = _Entry(prefix, blocks, 0.0, 0)
            self._lengths[len(prefix.tokens)] += 1
            self._hold(key, blocks, prefix)
        self._size += prefix.size
        self._use(key)
        while self._size > self._capacity:
            self._evict()
        if len(self._queue) > 64 + 4 * len(self._found):
            self._queue = [(self._worth(each), entry.used, each) for each, entry in self._found.items()]
            heapq.heapify(self._queue)

    def longest(self, tokens: npt.NDArray[np.int64], *, routed: bool = False) -> Prefix | None:
        """Longest cached proper prefix of `tokens`, or None. routed: only one with its routing."""
        if not self._found:
            return None
        hashes = self._hashes(tokens)
        found = self._whole(tokens, hashes, routed)
        least = 0 if found is None else len(self._found[found].prefix.tokens)
        part, length = self._part(tokens, hashes, routed, least)
        if part is not None:
            self._use(part)
            return self._found[part].prefix.begin(length)
        if found is not None:
            self._use(found)
            return self._found[found].prefix
        return None

    def clear(self) -> None:
        """Drop all prefixes, since keys and values of other weights are useless."""
        for each in (self._found, self._lengths, self._holders, self._queue):
            each.clear()
        self._size = 0
        self._say(Cleared())

    def _whole(self, tokens: npt.NDArray[np.int64], hashes: _Hashes, routed: bool) -> int | None:
        """The longest entry with which `tokens` begins."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(tokens):
                key = hashes.item(length - 1)
                if key in self._found and self._fits(key, tokens, length, routed):
                    return key
        return None

    def _part(self, tokens: npt.NDArray[np.int64], hashes: _Hashes, routed: bool, least: int) -> tuple[int | None, int]:
        """An entry of which more than `least` tokens, in whole blocks, begin `tokens`, and how many."""
        ends = hashes[BLOCK_TOKENS - 1 : len(tokens) - 1 : BLOCK_TOKENS].tolist()
        low, high = least // BLOCK_TOKENS, len(ends)
        while low < high:  # whoever has a block has those before it
            middle = (low + high + 1) // 2
            low, high = (middle, high) if ends[middle - 1] in self._holders else (low, middle - 1)
        for depth in range(low, least // BLOCK_TOKENS, -1):
            length = depth * BLOCK_TOKENS
            for key in self._holders.get(ends[depth - 1], ()):
                if self._fits(key, tokens, length, routed):
                    return key, length
        return None, 0

    def _fits(self, key: int, tokens: npt.NDArray[np.int64], length: int, routed: bool) -> bool:
        prefix = self._found[key].prefix
        return not (routed and prefix.routes is None) and np.array_equal(prefix.tokens[:length], tokens[:length])

    def _use(self, key: int) -> None:
        entry, self._now = self._found[key], self._now + 1
        entry.floor, entry.used = self._floor, self._now
        heapq.heappush(self._queue, (self._worth(key), entry.used, key))

    def _worth(self, key: int) -> float:
        """Share of an entry's tokens that no other one has, and what was evicted last when it was used."""
        entry = self._found[key]
        low, high = 0, len(entry.blocks)
        while low < high:  # other entries share the first blocks
            middle = (low + high) // 2
            low, high = (low, middle) if len(self._holders[entry.blocks[middle]]) == 1 else (middle + 1, high)
        return entry.floor + 1 - low * BLOCK_TOKENS / len(entry.prefix.tokens)

    def _hold(self, key: int, blocks: list[int], prefix: Prefix) -> None:
        new, alone = [], None
        for block in blocks:
            holders = self._holders.setdefault(block, {})
            if not holders:
                new.append(block)
            elif len(holders) == 1:
                alone = next(iter(holders))
            holders[key] = None
        if alone is not None:  # part of it is no longer its own
            heapq.heappush(self._queue, (self._worth(alone), self._found[alone].used, alone))
        if new:
            start = len(blocks) - len(new)
            tokens = prefix.tokens[start * BLOCK_TOKENS : len(blocks) * BLOCK_TOKENS]
            self._say(Stored(new, blocks[start - 1] if start else None, tokens.astype(np.int32), BLOCK_TOKENS))

    def _evict(self) -> None:
        worth, used, key = heapq.heappop(self._queue)
        entry = self._found.get(key)
        if entry is None or entry.used != used:
            return
        now = self._worth(key)
        if now > worth:
            heapq.heappush(self._queue, (now, used, key))
            return
        self._floor = max(self._floor, worth)
        self._drop(key, entry)

    def _drop(self, key: int, entry: _Entry) -> None:
        del self._found[key]
        self._size -= entry.prefix.size
        length = len(entry.prefix.tokens)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        gone = []
        for block in entry.blocks:
            del self._holders[block][key]
            if not self._holders[block]:
                del self._holders[block]
                gone.append(block)
        if gone:
            self._say(Removed(gone))

    def _say(self, event: Event) -> None:
        if self._publish is not None:
            self._publish(event)

    def _hashes(self, tokens: npt.NDArray[np.int64]) -> _Hashes:
        """Polynomial hash of every prefix, modulo 2**64."""
        while len(self._powers) < len(tokens):
            size = max(256, 2 * len(tokens))
            self._powers = np.cumprod(np.full(size, _FACTOR), dtype=np.uint64)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)]
        return np.cumsum(mixed, dtype=np.uint64)
