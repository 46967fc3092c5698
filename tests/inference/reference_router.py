"""Naive reference of the router's index: every replica's blocks as sets of token tuples."""

from __future__ import annotations

from collections.abc import Sequence

Prefix = tuple[int, ...]


class ReferenceCaches:
    """What each replica holds, by whole prefixes."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.held: dict[int, set[Prefix]] = {}

    def prefixes(self, tokens: Sequence[int]) -> list[Prefix]:
        """Prefixes of whole blocks, shortest first."""
        size = self.block_tokens
        return [tuple(tokens[: end * size]) for end in range(1, len(tokens) // size + 1)]

    def store(self, holder: int, prefixes: Sequence[Prefix]) -> None:
        """Add prefixes, each that of one block."""
        self.held.setdefault(holder, set()).update(prefixes)

    def remove(self, holder: int, prefixes: Sequence[Prefix]) -> None:
        """Take prefixes away."""
        self.held.setdefault(holder, set()).difference_update(prefixes)

    def depths(self, tokens: Sequence[int]) -> dict[int, int]:
        """Blocks of the prompt that each holder has without a gap; holders of none are left out."""
        found = {}
        for holder, held in self.held.items():
            depth = 0
            for prefix in self.prefixes(tokens):
                if prefix not in held:
                    break
                depth += 1
            if depth:
                found[holder] = depth
        return found
