"""Index of prefixes: hash of a prefix -> the holders that have all of it, in bounded memory.

A holder is a small integer, a set of holders an int with their bits. A block may be held without being reachable: an
engine can drop a block and keep the following ones, which no prompt finds until the dropped one is back. So sets of
reachable holders only shrink along a chain: one bisection finds where the last of them ends, and runs, the consecutive
blocks that the same holders reach, lead from there to the depths of the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inference.errors import RouterError

_EVICTED = 64
"""One in this many blocks is evicted at once, at the cap: finding the cheapest looks at all of them."""
_SETS = 1 << 16
"""Different sets of holders that are shared at most."""
_NONE = -1


class _Run:
    """Consecutive blocks of a chain that the same holders reach. Runs that follow each other may have equal ones."""

    __slots__ = ("above", "holders", "last", "start")

    def __init__(self, holders: int, start: int, above: _Run | None) -> None:
        """start: blocks before the first one. above: run of the last of these."""
        self.holders, self.start, self.above = holders, start, above
        self.last = _NONE
        """Slot of the last block."""


class PrefixIndex:
    """At most `capacity` blocks; beyond them those that were used least recently go, from the ends of chains."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise RouterError(f"capacity={capacity}: must be at least 1 block")
        self._capacity = capacity
        self._slots: dict[int, int] = {}
        self._keys: list[int] = []
        self._held: list[int] = []
        """Of each slot: the holders that have this block."""
        self._reach: dict[int, _Run] = {}
        """Hash -> run of the block: who has all blocks up to it. Not a column: a lookup touches less memory."""
        self._parent, self._child, self._next, self._previous = array("i"), array("i"), array("i"), array("i")
        self._depth = array("i")
        """Blocks of the prefix."""
        self._used = array("q")
        """Time of the last use, in calls; 0: the slot is free."""
        self._free: list[int] = []
        self._sets: dict[int, int] = {}
        """Sets of holders by themselves: equal ones are one object, which takes less memory and is at hand."""
        self._now = 0
        self.evicted = 0
        """Blocks evicted at the cap so far."""

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        """Whether the prefix is known."""
        return key in self._slots

    def depths(self, hashes: npt.NDArray[np.uint64], hint: int = 0) -> list[tuple[int, int]]:
        """(depth, holders) for each depth at which the prefix of some holders ends, in blocks, descending.

        hashes: of the prefixes of a prompt. hint: a guess of the largest depth, which saves lookups if it is right.
        Holders of nothing are left out.
        """
        reach, key = self._reach.get, hashes.item
        low, high, run = 0, len(hashes) + 1, None
        while high - low > 1:
            middle = hint if low < hint < high else low + 1 if 0 < low == hint else low + high >> 1
            here = reach(key(middle - 1))
            if here is None or not here.holders:
                high = middle
            else:
                low, run = middle, here
        found, beyond = [], 0
        while run is not None:
            if run.holders != beyond:
                found.append((low, run.holders ^ beyond))
            beyond, low, run = run.holders, min(run.start, low), run.above  # the lesser: equal hashes can be made
        return found

    def depth(self, key: int) -> int:
        """Blocks of a prefix; 0: unknown."""
        slot = self._slots.get(key, _NONE)
        return 0 if slot == _NONE else self._depth[slot]

    def reaches(self, key: int, holder: int) -> bool:
        """Whether a holder has all of a prefix."""
        return key in self._reach and bool(self._reach[key].holders >> holder & 1)

    def touch(self, key: int) -> None:
        """Note a use of the prefix, if it is known."""
        slot = self._slots.get(key)
        if slot is not None:
            self._now += 1
            self._used[slot] = self._now

    def store(self, keys: Sequence[int], holder: int, parent: int | None = None) -> int:
        """Add the blocks of a chain that continues the prefix `parent`; returns how many.

        Nothing is added if `parent` is unknown. Of more blocks than the capacity only the first ones are added.
        """
        if parent is not None:
            self.touch(parent)
        keys = keys[: self._capacity]
        lacking = len(self._slots) + len(keys) - self._capacity
        if lacking > 0:
            self._evict(max(lacking, self._capacity // _EVICTED))
        above, run, bit = _NONE, None, self._one(1 << holder)
        if parent is not None:
            above = self._slots.get(parent, _NONE)
            if above == _NONE:
                return 0
            run = self._reach[parent]
        self._now += 1
        for key in keys:
            slot = self._slots.get(key, _NONE)
            reaches = bit if run is None else run.holders & bit
            if slot == _NONE:
                slot = self._add(key, above)
                self._held[slot] = bit
                self._join(slot, reaches, run)
            elif not self._held[slot] & bit:
                self._held[slot] = self._one(self._held[slot] | bit)
                if reaches:
                    self._change_reach(slot, bit, True)
            self._used[slot] = self._now
            above, run = slot, self._reach[key]
        return len(keys)

    def remove(self, keys: Sequence[int], holders: int) -> None:
        """Take blocks from a set of holders. Unknown blocks, and those that they do not have, are ignored."""
        for key in keys:
            slot = self._slots.get(key, _NONE)
            if slot != _NONE and self._held[slot] & holders:
                self._take(slot, holders)

    def prune(self, tip: int, holder: int, kept: Callable[[int], bool]) -> None:
        """Take the prefix `tip` from a holder, up to a block that a longer prefix of it needs or that is `kept`."""
        bit, key = 1 << holder, tip
        while (slot := self._slots.get(key, _NONE)) != _NONE and self._held[slot] & bit and not kept(key):
            child = self._child[slot]
            while child != _NONE:
                if self._held[child] & bit:
                    return
                child = self._next[child]
            above = self._parent[slot]
            key = self._keys[above] if above != _NONE else -1
            self._take(slot, bit)

    def _take(self, slot: int, holders: int) -> None:
        self._held[slot] = self._one(self._held[slot] & ~holders)
        goes = not self._held[slot] and self._child[slot] == _NONE
        if not goes and self._reach[self._keys[slot]].holders & holders:
            self._change_reach(slot, holders, False)
        while slot != _NONE and not self._held[slot] and self._child[slot] == _NONE:
            slot = self._delete(slot)

    def _change_reach(self, slot: int, bits: int, reaches: bool) -> None:
        """Make a block, and those after it, reachable for one holder, or unreachable for several."""
        above = self._parent[slot]
        stack = [(slot, None if above == _NONE else self._reach[self._keys[above]])]
        while stack:
            slot, run = stack.pop()
            before, above = self._reach[self._keys[slot]], self._parent[slot]
            if reaches:
                before.start = self._depth[slot]  # the block was its first one
            elif above != _NONE and self._depth[above] < self._depth[before.last]:
                before.last = above
            run = self._join(slot, before.holders | bits if reaches else before.holders & ~bits, run)
            child = self._child[slot]
            while child != _NONE:
                if self._held[child] & bits:
                    stack.append((child, run))
                else:
                    self._reach[self._keys[child]].above = run
                child = self._next[child]

    def _join(self, slot: int, holders: int, above: _Run | None) -> _Run:
        """Put a block into the run `above` of its parent, if the same holders reach both and no sibling is in it, else
        into one of its own.
        """
        if above is None or above.holders != holders or above.last != self._parent[slot]:
            above = _Run(holders, self._depth[slot] - 1, above)
        above.last = slot
        self._reach[self._keys[slot]] = above
        return above

    def _one(self, holders: int) -> int:
        """The one object for this set."""
        if len(self._sets) > _SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)

    def _add(self, key: int, above: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            self._held.append(0)
            for column in (self._parent, self._child, self._next, self._previous, self._depth, self._used):
                column.append(_NONE)
        self._slots[key] = slot
        self._parent[slot], self._child[slot], self._previous[slot] = above, _NONE, _NONE
        after, self._depth[slot] = _NONE, 1
        if above != _NONE:
            self._depth[slot] += self._depth[above]
            after, self._child[above] = self._child[above], slot
        self._next[slot] = after
        if after != _NONE:
            self._previous[after] = slot
        return slot

    def _delete(self, slot: int) -> int:
        """Forget a block without children; returns its parent, which was used at least as recently."""
        above, before, after = self._parent[slot], self._previous[slot], self._next[slot]
        if after != _NONE:
            self._previous[after] = before
        if before != _NONE:
            self._next[before] = after
        elif above != _NONE:
            self._child[above] = after
        if above != _NONE:
            self._used[above] = max(self._used[above], self._used[slot])
        del self._slots[self._keys[slot]]
        self._reach.pop(self._keys[slot]).last = above
        self._keys[slot] = self._held[slot] = self._used[slot] = 0
        self._free.append(slot)
        return above

    def _evict(self, count: int) -> None:
        """Forget `count` blocks, leaves first, the least recently used ones and what only led to them."""
        while count > 0:
            used = np.array(self._used)
            leaves = np.flatnonzero((np.array(self._child) == _NONE) & (used > 0))
            if len(leaves) > count:
                leaves = leaves[np.argpartition(used[leaves], count)[:count]]
            leaves = leaves[np.argsort(used[leaves], kind="stable")]
            newest = used[leaves[-1]]
            for leaf in leaves.tolist():
                slot = leaf
                while count and slot != _NONE and self._child[slot] == _NONE and self._used[slot] <= newest:
                    slot = self._delete(slot)
                    count -= 1
                    self.evicted += 1
