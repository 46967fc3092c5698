"""State of one request under its grammar. Used in the engine's thread alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from contracts.supports import Mask
from inference.grammar.library import xgrammar


def only_token(mask: Mask | None) -> int | None:
    """The token to which a grammar leaves no alternative; None if there are others. mask: of `Matcher.mask`."""
    return int(mask.argmax()) if mask is not None and np.count_nonzero(mask) == 1 else None


class Matcher:
    """Which tokens may come next."""

    def __init__(self, grammar: Any, size: int) -> None:
        """grammar: xgrammar's CompiledGrammar. size: of the vocabulary."""
        self._matcher = xgrammar().GrammarMatcher(grammar)
        self._bits = xgrammar().allocate_token_bitmask(1, size)
        self._size = size

    def mask(self) -> Mask | None:
        """bool [vocabulary]: the allowed tokens, at least one; None if all are."""
        if not self._matcher.fill_next_token_bitmask(self._bits, 0):
            return None
        return np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._size].view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on after `token`, which the mask allows."""
        if not self._matcher.accept_token(token):
            raise AssertionError(f"token {token} is not allowed by its grammar")

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self._matcher.rollback(count)
