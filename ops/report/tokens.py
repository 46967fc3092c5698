"""Compact form of tokens for the page: ids, runs of roles, logprobs in hundredths, and the text of each id once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from contracts.chat import ChatTokenizer
from contracts.episodes import TokenRole

UNFINISHED = "\ufffd"
"""Decoder output for an incomplete character."""
MAX_JOINED = 8
"""Tokens that may share one character or emoji."""
WORST = 9999
"""Largest stored value, in hundredths of a nat: logprobs below -99.99 are shown as -99.99."""


class Vocabulary:
    """Texts of token ids, each decoded once."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: dict[int, str] = {}

    def sequence(
        self, token_ids: Sequence[int], roles: Sequence[int], logprobs: Sequence[float | None]
    ) -> dict[str, Any]:
        """One sequence for the page. logprobs: of policy tokens only, in hundredths of a nat, positive; -1 if unknown.

        joined: texts that differ from the id's own. A character of several tokens is placed at the first of them.
        """
        policy = [value for value, role in zip(logprobs, roles, strict=True) if role == TokenRole.POLICY]
        found: dict[str, Any] = {
            "ids": list(token_ids),
            "roles": [[int(role), len(list(run))] for role, run in groupby(roles)],
            "logprobs": [_hundredths(value) for value in policy],
        }
        joined = self._joined(token_ids)
        return found | ({"joined": {str(at): text for at, text in joined.items()}} if joined else {})

    def _text(self, token: int) -> str:
        if token not in self.texts:
            self.texts[token] = self._tokenizer.decode([token])
        return self.texts[token]

    def _joined(self, token_ids: Sequence[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        end = 0
        for start, token in enumerate(token_ids):
            if UNFINISHED not in self._text(token) or start < end:
                continue
            for stop in range(start + 2, min(start + MAX_JOINED, len(token_ids)) + 1):
                text = self._tokenizer.decode(token_ids[start:stop])
                if UNFINISHED not in text:
                    end = stop
                    found |= {start: text} | dict.fromkeys(range(start + 1, stop), "")
                    break
        return found


def _hundredths(logprob: float | None) -> int:
    if logprob is None or math.isnan(logprob):
        return -1
    return min(WORST, max(0, round(-100 * max(logprob, -WORST))))
