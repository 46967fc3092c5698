"""Index of prefixes: hash of a prefix -> the holders that have all of it, in bounded memory.

A holder is a small integer, a set of holders an int with their bits. A block may be held without being reachable: an
engine can drop a block and keep the following ones, which no prompt finds until the dropped one is back. So sets of
reachable holders only shrink along a chain, and the depths of all holders are found by bisecting where they change.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inference.errors import RouterError

_EVICTED = 64
"""One in this many blocks is evicted at once, at the cap: finding the cheapest looks at all of them."""
_NONE = -1


class PrefixIndex:
    """At most `capacity` blocks; beyond them those that were used least recently go, from the ends of chains."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise RouterError(f"capacity={capacity}: must be at least 1 block")
        self._capacity = capacity
        self._slots: dict[int, int] = {}
        self._keys: list[int] = []
        self._held: list[int] = []
        self._reach: list[int] = []
        """Of each slot: the holders that have this block, and those that have all blocks up to it."""
        self._parent, self._child, self._next, self._previous = array("i"), array("i"), array("i"), array("i")
        self._used = array("q")
        """Time of the last use, in calls; 0: the slot is free."""
        self._free: list[int] = []
        self._now = 0
        self.evicted = 0
        """Blocks evicted at the cap so far."""

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._slots)

    def __contains__(self, key: int) -> bool:
        """Whether the prefix is known."""
        return key in self._slots

    def depths(self, hashes: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
        """(depth, holders) for each depth at which the prefix of some holders ends, in blocks, ascending.

        hashes: of the prefixes of a prompt. Holders of nothing are left out.
        """
        if not len(hashes):
            return []
        find, key, reach = self._slots.get, hashes.item, self._reach
        slot = find(key(0))
        mask = 0 if slot is None else reach[slot]
        low, found = 0, []
        ends = [(len(hashes), 0)]
        while mask:
            high, beyond = ends.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                slot = find(key(middle))
                here = 0 if slot is None else reach[slot]
                if here == mask:
                    low = middle
                else:
                    ends.append((high, beyond))
                    high, beyond = middle, here
            found.append((high, mask & ~beyond))
            low, mask = high, beyond
        return found

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
        above, bit = _NONE, 1 << holder
        if parent is not None:
            above = self._slots.get(parent, _NONE)
            if above == _NONE:
                return 0
        reaches = above == _NONE or self._reach[above] & bit
        self._now += 1
        for key in keys:
            slot = self._slots.get(key, _NONE)
            if slot == _NONE:
                slot = self._add(key, above)
                self._held[slot] = bit
                if reaches:
                    self._reach[slot] = bit
            elif not self._held[slot] & bit:
                self._held[slot] |= bit
                if reaches:
                    self._set_reach(slot, bit)
            self._used[slot] = self._now
            above, reaches = slot, self._reach[slot] & bit
        return len(keys)

    def remove(self, keys: Sequence[int], holder: int) -> None:
        """Take blocks from a holder. Unknown ones, and those that it does not have, are ignored."""
        bit = 1 << holder
        for key in keys:
            slot = self._slots.get(key, _NONE)
            if slot != _NONE and self._held[slot] & bit:
                self._take(slot, bit)

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

    def _take(self, slot: int, bit: int) -> None:
        self._held[slot] &= ~bit
        if self._reach[slot] & bit:
            self._clear_reach(slot, bit)
        while slot != _NONE and not self._held[slot] and self._child[slot] == _NONE:
            slot = self._delete(slot)

    def _set_reach(self, slot: int, bit: int) -> None:
        """Make a block reachable for a holder, and what it has beyond."""
        stack = [slot]
        while stack:
            slot = stack.pop()
            self._reach[slot] |= bit
            child = self._child[slot]
            while child != _NONE:
                if self._held[child] & bit:
                    stack.append(child)
                child = self._next[child]

    def _clear_reach(self, slot: int, bit: int) -> None:
        stack = [slot]
        while stack:
            slot = stack.pop()
            self._reach[slot] &= ~bit
            child = self._child[slot]
            while child != _NONE:
                if self._reach[child] & bit:
                    stack.append(child)
                child = self._next[child]

    def _add(self, key: int, above: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            for masks in (self._held, self._reach):
                masks.append(0)
            for column in (self._parent, self._child, self._next, self._previous, self._used):
                column.append(_NONE)
        self._slots[key] = slot
        self._parent[slot], self._child[slot], self._previous[slot] = above, _NONE, _NONE
        after = _NONE
        if above != _NONE:
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
        self._keys[slot] = self._held[slot] = self._reach[slot] = self._used[slot] = 0
        self._free.append(slot)
        return above

    def _evict(self, count: int) -> None:
        """Forget `count` blocks, leaves first, the least recently used ones and what only led to them."""
        while count > 0:
            used = np.array(self._used)
            leaves = np.flatnonzero((np.array(self._child) == _NONE) & (used > 0))
            leaves = leaves[np.argsort(used[leaves], kind="stable")][:count]
            newest = used[leaves[-1]]
            for leaf in leaves.tolist():
                slot = leaf
                while count and slot != _NONE and self._child[slot] == _NONE and self._used[slot] <= newest:
                    slot = self._delete(slot)
                    count -= 1
                    self.evicted += 1
