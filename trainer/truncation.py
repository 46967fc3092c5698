"""Rules for demonstrations that are longer than the model's context. Importing this needs no torch."""

from __future__ import annotations

from typing import Literal

import numpy as np

from contracts.episodes import TokenRole

Truncation = Literal["error", "drop", "left", "right", "last_turns"]
"""error: refuse the row. drop: leave it out. left, right: cut tokens at the begin or at the end. last_turns: keep the
tokens before the first policy token and as many of the last turns as fit. A turn begins with each run of policy tokens
and ends before the next one.
"""


def keep_tokens(roles: np.ndarray, longest: int, rule: Truncation) -> np.ndarray:
    """bool [tokens]: tokens of one sequence that `rule` keeps, at most `longest`; none if the row is left out.

    roles: [tokens], of `contracts.episodes.TokenRole`.
    """
    count = len(roles)
    keep = np.zeros(count, np.bool_)
    if count <= longest:
        keep[:] = True
    elif rule == "left":
        keep[count - longest :] = True
    elif rule == "right":
        keep[:longest] = True
    elif rule == "last_turns":
        policy = roles == TokenRole.POLICY
        turns = np.flatnonzero(policy & ~np.concatenate([[False], policy[:-1]]))
        fitting = [turn for turn in turns if turns[0] + count - turn <= longest]
        if fitting:
            keep[: turns[0]] = True
            keep[fitting[0] :] = True
    return keep
