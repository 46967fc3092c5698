"""Put guessed and forced tokens after the scheduler's sequences, to be computed in the same pass."""

from __future__ import annotations

from contracts.supports import Mask
from inference.engines.drafts import ORDERS, Drafts
from inference.engines.kv import round_up
from inference.engines.model import QUERY_ROWS, TOKEN_ROWS
from inference.engines.requests import SequenceTable
from inference.grammar.matcher import only_token

LONGEST = 7
"""Tokens after one sequence in a step."""


class Guesser:
    """Guesses for the sequences of a table."""

    def __init__(self, table: SequenceTable, drafts: Drafts | None) -> None:
        """drafts: None to insert only what grammars force."""
        self._table, self._drafts = table, drafts

    def room(self, count: int) -> int:
        """Guesses of each of `count` sequences that the batch pads anyway: rows of products, and of each sequence in
        attention.
        """
        if self._drafts is None:
            return 0
        rows = (round_up(count, TOKEN_ROWS) - count) // count
        return min(rows, LONGEST if count == 1 else QUERY_ROWS - 1)

    def guesses(self, first: int, last: int, room: int, longest: int = LONGEST) -> list[list[Mask | None]] | None:
        """Put guessed tokens after the sequences of the slots [first, last).

        Returns the grammar's masks of the positions to sample, for each slot: one more than guesses. None if nothing is
        guessed and no request is restricted. room: guesses of a slot that the batch's padding holds; only tokens that a
        grammar forces go beyond it, up to `longest`.
        """
        if not room and not any(request.restriction for request in self._table.requests[first:last]):
            return None
        if room:
            for slot in range(first, last):
                self.learn(slot)
        return [self._guess(slot, room, longest) for slot in range(first, last)]

    def _guess(self, slot: int, room: int, longest: int) -> list[Mask | None]:
        """The part of `guesses` for one slot."""
        table, request = self._table, self._table.requests[slot]
        restriction, stops, length = request.restriction, request.params.stop_token_ids, int(self._table.length[slot])
        masks = [None if restriction is None else restriction.mask]
        # the last token that may be sampled is never fed
        for place in range(length, min(length + longest, int(table.limit[slot]) - 1)):
            mask = masks[-1]
            token = only_token(mask)
            if token is None and place < length + room and self._drafts is not None:
                token = self._drafts.guess(table.tokens[slot, max(0, place - max(ORDERS)) : place].tolist())
            if token is None or token in stops or not (mask is None or mask[token]):
                break
            if restriction is not None and not restriction.try_token(token):
                break
            table.tokens[slot, place] = token
            masks.append(None if restriction is None else restriction.mask)
        return masks

    def learn(self, slot: int) -> None:
        """Remember a slot's tokens for later guesses."""
        request, length = self._table.requests[slot], int(self._table.length[slot])
        if self._drafts is not None and request.learned < length:
            first = max(0, request.learned - max(ORDERS))
            self._drafts.learn(self._table.tokens[slot, first:length].tolist(), request.learned - first)
            request.learned = length
