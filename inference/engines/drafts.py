"""Drafts: guesses of the tokens that come next, from what the engine has seen lately.

A draft is computed in the same forward pass as the token before it, and kept as far as sampling would have drawn the
same tokens, with the same random numbers. So drafts change no token and no log probability, only the number of passes.
Siblings of a group write much of the same text, and tool calls repeat what the policy has read.
"""

from __future__ import annotations

from collections.abc import Sequence

ORDERS = (6, 3)
"""Tokens of context that a guess depends on; the longest that has been seen decides."""
CAPACITY = 1 << 17
"""Contexts that are remembered, at least; up to twice as many take some 200 bytes each."""


class Drafts:
    """The token that last followed each context."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._recent: dict[tuple[int, ...], int] = {}
        self._older: dict[tuple[int, ...], int] = {}

    def learn(self, tokens: Sequence[int], first: int) -> None:
        """Remember the tokens [first, end) of a sequence, each after those before it."""
        for place in range(first, len(tokens)):
            for order in ORDERS:
                if place >= order:
                    self._recent[tuple(tokens[place - order : place])] = tokens[place]
        if len(self._recent) > self._capacity:
            self._recent, self._older = {}, self._recent

    def guess(self, tokens: Sequence[int]) -> int | None:
        """The next token; None without an idea. tokens: the last max(ORDERS) of the sequence, or all."""
        for order in ORDERS:
            if len(tokens) >= order:
                context = tuple(tokens[len(tokens) - order :])
                found = self._recent.get(context)
                found = self._older.get(context) if found is None else found
                if found is not None:
                    return found
        return None
