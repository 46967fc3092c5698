"""State of one request under its grammar. Used in the engine's thread alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from contracts.supports import Mask
from inference.errors import EngineError
from inference.grammar.library import xgrammar

TOKEN_S = 0.05
"""Processor time that matching a token may take on average, in seconds."""
TOKENS = 16
"""Tokens whose processor time may be taken at once."""


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
        self._over_s = 0.0
        """Processor time beyond TOKEN_S for each token, in seconds; never below 0, so that nothing is saved up."""

    def mask(self) -> Mask | None:
        """bool [vocabulary]: the allowed tokens, at least one; None if all are."""
        began = time.thread_time()
        restricted = self._matcher.fill_next_token_bitmask(self._bits, 0)
        self._over_s += time.thread_time() - began
        if not restricted:
            return None
        return np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little")[: self._size].view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on after `token`, which the mask allows."""
        began = time.thread_time()
        accepted = self._matcher.accept_token(token)
        self._over_s = max(0.0, self._over_s + time.thread_time() - began - TOKEN_S)
        if not accepted:
            raise AssertionError(f"token {token} is not allowed by its grammar")

    def check_cost(self) -> None:
        """Raise EngineError for a grammar that takes too long to follow: other requests wait for it."""
        if self._over_s > TOKENS * TOKEN_S:
            raise EngineError(
                f"the grammar takes more than {TOKEN_S * 1000:g} ms of processor time a token: remove its ambiguity,"
                " such as a rule that repeats itself on both sides"
            )

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self._matcher.rollback(count)
