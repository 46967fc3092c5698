"""KV prefix cache of one engine: keys and values of finished sequences.

A prompt that begins with a cached sequence computes only the rest.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from contracts.routing import Routes

_FACTOR = np.uint64(0x5851F42D4C957F2D)


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


class PrefixStore:
    """Bounded map from token prefix to Prefix; the least recently used is dropped. Hits are verified token by token."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._found: OrderedDict[int, Prefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._powers = np.ones(0, np.uint64)

    @property
    def enabled(self) -> bool:
        """Whether the capacity is above 0."""
        return self._capacity > 0

    def put(self, prefix: Prefix) -> None:
        """Add `prefix`, and drop the least recently used ones beyond the capacity."""
        key = int(self._hashes(prefix.tokens)[-1])
        self._drop(key)
        self._found[key] = prefix
        self._lengths[len(prefix.tokens)] += 1
        self._size += prefix.size
        while self._size > self._capacity:
            self._drop(next(iter(self._found)))

    def longest(self, tokens: npt.NDArray[np.int64], *, routed: bool = False) -> Prefix | None:
        """Longest cached proper prefix of `tokens`, or None. routed: only one with its routing."""
        if not self._found:
            return None
        hashes = self._hashes(tokens)
        for length in sorted(self._lengths, reverse=True):
            if length >= len(tokens):
                continue
            key = int(hashes[length - 1])
            prefix = self._found.get(key)
            if prefix is None or (routed and prefix.routes is None):
                continue
            if np.array_equal(prefix.tokens, tokens[:length]):
                self._found.move_to_end(key)
                return prefix
        return None

    def clear(self) -> None:
        """Drop all prefixes, since keys and values of other weights are useless."""
        self._found.clear()
        self._lengths.clear()
        self._size = 0

    def _drop(self, key: int) -> None:
        prefix = self._found.pop(key, None)
        if prefix is None:
            return
        self._size -= prefix.size
        length = len(prefix.tokens)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def _hashes(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Polynomial hash of every prefix, modulo 2**64."""
        while len(self._powers) < len(tokens):
            size = max(256, 2 * len(tokens))
            self._powers = np.cumprod(np.full(size, _FACTOR), dtype=np.uint64)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)]
        return np.cumsum(mixed, dtype=np.uint64)
