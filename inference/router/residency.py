"""What each replica has in its cache: from its events where it sends them, and assumed from our own decisions.

A replica has two holders in the index: 2 i for what its events say, 2 i + 1 for what is assumed. Assumptions end after
a lifetime, and with the event that drops a block; they tell of requests whose events are still to come, and of replicas
that send none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from inference.errors import RouterError
from inference.router.fingerprint import Fingerprinter, Tokens
from inference.router.index import PrefixIndex

_UNKNOWN = -1
_PAIRS = 4
"""Engine hashes that are kept for each block of the index, at most: its copies at replicas."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """An engine has cached the blocks of a chain."""

    blocks: Sequence[Hashable]
    """The engine's hashes of the blocks, first to last."""
    parent: Hashable | None
    """The engine's hash of the block before them; None at the beginning of a prompt."""
    tokens: Tokens
    """[len(blocks) * block_tokens] token ids."""
    block_tokens: int
    namespace: int | None = None
    """Of a chain without parent, if it is known: value of its Namespace. None: the one that the replica serves."""


@dataclass(frozen=True)
class Removed:
    """An engine has dropped blocks, named by its own hashes."""

    blocks: Sequence[Hashable]


@dataclass(frozen=True)
class Cleared:
    """An engine has dropped all blocks."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True)
class Batch:
    """Events of one replica that happened together."""

    sequence: int
    """Number of the batch: 0, 1, 2, ... since the replica's start."""
    events: Sequence[Event]


Replay = Callable[[int, int], Iterable[Batch]]
"""Batches `first` to `last` of a replica, as far as it still has them."""


@dataclass
class _Source:
    holder: int
    namespace: int
    replay: Replay | None
    next: int = 0
    """Sequence number of the next batch."""
    known: dict[Hashable, int] = field(default_factory=dict)
    """The engine's hash of a block -> hash of the prefix that ends with it."""
    leases: dict[int, float] = field(default_factory=dict)
    """Last block of an assumed prefix -> end of its lifetime."""
    said: set[str] = field(default_factory=set)
    """Faults that were logged; each is logged once."""


@dataclass
class Counters:
    """What happened to events since the start."""

    applied: int = 0
    """Batches."""
    late: int = 0
    """Batches that had been applied before, and were ignored."""
    lost: int = 0
    """Batches that could not be replayed; each gap cleared its replica."""
    orphans: int = 0
    """Blocks stored after a block that the index does not know, and ignored."""


class Residency:
    """Keeps the index up to date. At most _PAIRS engine hashes are kept for each block of its capacity."""

    def __init__(self, index: PrefixIndex, hasher: Fingerprinter, *, capacity: int, lifetime_s: float) -> None:
        """capacity: of the index, in blocks. lifetime_s: of assumptions."""
        self._index, self._hasher = index, hasher
        self._most, self._lifetime_s = _PAIRS * capacity, lifetime_s
        self._sources: dict[str, _Source] = {}
        self._pairs = 0
        self._ends: deque[tuple[float, _Source, int]] = deque()
        """End of lifetime, replica and last block of assumptions, in order; those prolonged stand here twice."""
        self.counters = Counters()

    def add(self, name: str, place: int, namespace: int, replay: Replay | None = None) -> None:
        """Begin with an empty replica. place: small integer of its own."""
        self._sources[name] = _Source(2 * place, namespace, replay)

    def remove(self, name: str) -> None:
        """Forget a replica that is gone, or whose cache is."""
        self.clear(name)
        del self._sources[name]

    def serve(self, name: str, namespace: int) -> None:
        """Later events and assumptions are of another namespace, that of another policy for example."""
        self._source(name).namespace = namespace

    def clear(self, name: str) -> None:
        """Forget all that the replica has."""
        source = self._source(name)
        self._dropped(source, [*source.known.values()])
        source.known.clear()
        for tip in source.leases:
            self._index.prune(tip, source.holder + 1, lambda key: False)
        source.leases.clear()

    def restart(self, name: str) -> None:
        """Forget all that the replica has, since it has restarted; its batches are numbered from 0 again."""
        self.clear(name)
        self._source(name).next = 0

    def awaited(self, name: str) -> int:
        """Sequence number of the replica's next batch."""
        return self._source(name).next

    def apply(self, name: str, batch: Batch) -> None:
        """Apply a batch; those missing before it are replayed, or the replica is cleared first.

        Batch 0 after others is a restart, and clears. Raises RouterError for an unknown replica and for blocks of
        another size; the events before them stay applied.
        """
        source = self._source(name)
        if batch.sequence == 0 and source.next:
            self.restart(name)
        if batch.sequence < source.next:
            self.counters.late += 1
            return
        if batch.sequence > source.next:
            self._recover(name, source, batch.sequence)
        self._apply(name, source, batch)

    def _recover(self, name: str, source: _Source, until: int) -> None:
        for batch in source.replay(source.next, until - 1) if source.replay is not None else ():
            if batch.sequence != source.next or batch.sequence == until:
                break
            self._apply(name, source, batch)
        missing = until - source.next
        if missing:
            self.clear(name)
            self.counters.lost += missing
            self._say(name, source, "cache events are lost: its cache counts as empty, and by our own requests")

    def _apply(self, name: str, source: _Source, batch: Batch) -> None:
        source.next = batch.sequence + 1
        self.counters.applied += 1
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(name, source, event)
            elif isinstance(event, Removed):
                self._dropped(source, [source.known.pop(block) for block in event.blocks if block in source.known])
            else:
                self.clear(name)

    def _dropped(self, source: _Source, hashes: Sequence[int]) -> None:
        """Blocks that the replica's events reported are gone: they are no longer assumed to be there either."""
        self._pairs -= len(hashes)
        self._index.remove(hashes, 0b11 << source.holder)

    def _stored(self, name: str, source: _Source, event: Stored) -> None:
        size = self._hasher.block_tokens
        if event.block_tokens != size or len(event.tokens) != size * len(event.blocks):
            raise RouterError(
                f"{name} sent {len(event.tokens)} tokens for {len(event.blocks)} blocks of {event.block_tokens}, the"
                f" router's blocks have {size}: set the router's block_tokens to the engine's block size, equal in all"
                " replicas"
            )
        parent = None if event.parent is None else source.known.get(event.parent, _UNKNOWN)
        depth = 0 if parent is None else self._index.depth(parent)
        if parent is not None and not depth:
            self.counters.orphans += len(event.blocks)
            self._say(name, source, "blocks follow unknown ones: they count by our own requests only")
            return
        namespace = source.namespace if event.namespace is None else event.namespace
        hashes = self._hasher.prefixes(event.tokens, namespace if parent is None else parent, depth).tolist()
        stored = self._index.store(hashes, source.holder, parent)
        self.counters.orphans += len(hashes) - stored
        before = len(source.known)
        source.known.update(zip(event.blocks[:stored], hashes, strict=False))
        self._pairs += len(source.known) - before
        while self._pairs > self._most:
            oldest = next(iter(source.known))
            self._index.remove([source.known.pop(oldest)], 1 << source.holder)
            self._pairs -= 1

    def assume(self, name: str, hashes: npt.NDArray[np.uint64], depths: Sequence[tuple[int, int]], now: float) -> None:
        """The replica is about to cache a prompt. depths: of its prefixes in the index."""
        if not len(hashes):
            return
        source = self._source(name)
        holder, depth = source.holder + 1, self.assumed(name, depths)
        known = _held(depths, source.holder)
        if known:
            self._index.touch(hashes.item(known - 1))
        parent = hashes.item(depth - 1) if depth else None
        if not self._index.store(hashes[depth:].tolist(), holder, parent) and depth < len(hashes):
            self._index.store(hashes.tolist(), holder)  # evicted since the choice
        self._lease(source, hashes.item(len(hashes) - 1), now)

    def assumed(self, name: str, depths: Sequence[tuple[int, int]]) -> int:
        """Blocks of a prompt that the replica is assumed to have. depths: of its prefixes in the index."""
        return _held(depths, self._source(name).holder + 1)

    def continue_assumed(self, name: str, parent: int | None, hashes: Sequence[int], now: float) -> None:
        """The replica is about to cache blocks after the prefix `parent`, which it is assumed to have; ignored if not.

        hashes: of the prefixes that end with them; none prolongs the lifetime of `parent`.
        """
        source = self._source(name)
        holder = source.holder + 1
        if parent is not None and not self._index.reaches(parent, holder):
            return
        self._index.store(hashes, holder, parent)
        tip = hashes[-1] if hashes else parent
        if tip is not None and self._index.reaches(tip, holder):
            self._lease(source, tip, now)

    def _lease(self, source: _Source, tip: int, now: float) -> None:
        end = now + self._lifetime_s
        source.leases[tip] = end
        self._ends.append((end, source, tip))

    def expire(self, now: float) -> None:
        """End the assumptions whose lifetime is over, and the oldest ones beyond the capacity."""
        while self._ends and (self._ends[0][0] <= now or len(self._ends) > self._most):
            end, source, tip = self._ends.popleft()
            if source.leases.get(tip) == end:
                del source.leases[tip]
                self._index.prune(tip, source.holder + 1, source.leases.__contains__)

    def _say(self, name: str, source: _Source, fault: str) -> None:
        if fault not in source.said:
            source.said.add(fault)
            _log.warning("%s: %s; said once", name, fault)

    def _source(self, name: str) -> _Source:
        source = self._sources.get(name)
        if source is None:
            raise RouterError(f"the router has no replica {name!r}: add it before its events and requests")
        return source


def _held(depths: Sequence[tuple[int, int]], holder: int) -> int:
    """Blocks of a prompt that a holder has. depths: of the prompt's prefixes, see PrefixIndex.depths."""
    return next((depth for depth, holders in depths if holders >> holder & 1), 0)
