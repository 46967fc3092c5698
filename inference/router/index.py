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
_SETS = 1 << 16
"""Different sets of holders that are shared at most."""
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
        """Of each slot: the holders that have this block."""
        self._reach: dict[int, int] = {}
        """Hash -> the holders that have all blocks up to this one. Not a column: a lookup touches less memory."""
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

    def depths(self, hashes: npt.NDArray[np.uint64], hints: Sequence[int] = ()) -> list[tuple[int, int]]:
        """(depth, holders) for each depth at which the prefix of some holders ends, in blocks, ascending.

        hashes: of the prefixes of a prompt. hints: depths that were found for a shorter one, ascending; they save
        lookups. Holders of nothing are left out.
        """
        if not len(hashes):
            return []
        reach, key = self._reach.get, hashes.item
        mask, low, found = reach(key(0), 0), 0, []
        ends, guesses = [(len(hashes), 0)], iter(hints)
        guess = 0
        while mask:
            high, beyond = ends.pop()
            if beyond == mask:
                low = high
                continue
            while guess <= low:
                guess = next(guesses, len(hashes) + 1)
            while high - low > 1:
                middle = guess if guess < high else guess - 1 if low < guess - 1 < high else low + high >> 1
                here = reach(key(middle), 0)
                if here == mask:
                    low = middle
                    while guess <= low:
                        guess = next(guesses, len(hashes) + 1)
                else:
                    ends.append((high, beyond))
                    high, beyond = middle, here
            found.append((high, mask & ~beyond))
            low, mask = high, beyond
        return found

    def depth(self, key: int) -> int:
        """Blocks of a prefix; 0: unknown."""
        slot = self._slots.get(key, _NONE)
        return 0 if slot == _NONE else self._depth[slot]

    def reaches(self, key: int, holder: int) -> bool:
        """Whether a holder has all of a prefix."""
        return bool(self._reach.get(key, 0) >> holder & 1)

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
        above, bit = _NONE, self._one(1 << holder)
        if parent is not None:
            above = self._slots.get(parent, _NONE)
            if above == _NONE:
                return 0
        reach = self._reach
        reaches = above == _NONE or reach[parent] & bit  # type: ignore[index]
        self._now += 1
        for key in keys:
            slot = self._slots.get(key, _NONE)
            if slot == _NONE:
                slot = self._add(key, above)
                self._held[slot], reach[key] = bit, bit if reaches else 0
            elif not self._held[slot] & bit:
                self._held[slot] = self._one(self._held[slot] | bit)
                if reaches:
                    self._set_reach(slot, bit)
            self._used[slot] = self._now
            above, reaches = slot, reach[key] & bit
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
        self._held[slot] = self._one(self._held[slot] & ~bit)
        if self._reach[self._keys[slot]] & bit:
            self._clear_reach(slot, bit)
        while slot != _NONE and not self._held[slot] and self._child[slot] == _NONE:
            slot = self._delete(slot)

    def _set_reach(self, slot: int, bit: int) -> None:
        """Make a block reachable for a holder, and what it has beyond."""
        stack = [slot]
        while stack:
            slot = stack.pop()
            self._reach[self._keys[slot]] = self._one(self._reach[self._keys[slot]] | bit)
            child = self._child[slot]
            while child != _NONE:
                if self._held[child] & bit:
                    stack.append(child)
                child = self._next[child]

    def _clear_reach(self, slot: int, bit: int) -> None:
        stack = [slot]
        while stack:
            slot = stack.pop()
            self._reach[self._keys[slot]] = self._one(self._reach[self._keys[slot]] & ~bit)
            child = self._child[slot]
            while child != _NONE:
                if self._reach[self._keys[child]] & bit:
                    stack.append(child)
                child = self._next[child]

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
        del self._slots[self._keys[slot]], self._reach[self._keys[slot]]
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
