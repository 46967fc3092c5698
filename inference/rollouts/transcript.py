"""Growing tokens of one context: appended by their source, never tokenized again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts.episodes import TokenRole, TokenSequence
from contracts.routing import Routes, decode_routes, encode_routes
from contracts.supports import SupportsWriter, decode_supports, encode_supports
from inference.engines.base import Completion


class Transcript:
    """Token ids with roles, logprobs and policy spans, all of equal length."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        """What the engine is asked to continue."""
        self._roles: list[int] = []
        self._logprobs: list[float | None] = []
        self._spans: list[tuple[str, int, int]] = []
        self._routes: list[Routes] = []
        self._supports = SupportsWriter()
        self._append(prompt_ids, TokenRole.PROMPT)

    @classmethod
    def of(cls, sequence: TokenSequence) -> Transcript:
        """Transcript that continues a recorded sequence."""
        made = cls([])
        made.token_ids, made._roles = list(sequence.token_ids), list(sequence.token_role)
        made._logprobs, made._spans = list(sequence.logprobs), list(sequence.policy_spans)
        if sequence.routed_experts is not None:
            made._routes.append(decode_routes(sequence.routed_experts))
        if sequence.supports is not None:
            made._supports.extend(decode_supports(sequence.supports))
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def routed(self) -> int:
        """Number of positions whose routing is recorded. The last sampled token's follows with the next turn."""
        return sum(map(len, self._routes))

    def add_policy(self, completion: Completion) -> None:
        """Append what the policy sampled, its stop token included, and the routing of the positions since the last
        turn's.
        """
        start = len(self)
        if completion.routed_experts is not None:
            self._routes.append(completion.routed_experts)
        for version, first, last in completion.spans:
            self._add_span(version, start + first, start + last)
        self.token_ids += completion.token_ids
        forced = completion.forced or [False] * len(completion.token_ids)
        self._roles += [int(TokenRole.FORCED if each else TokenRole.POLICY) for each in forced]
        self._logprobs += [None if each else value for each, value in zip(forced, completion.logprobs, strict=True)]
        if completion.supports is not None:
            self._supports.add(None, start - len(self._supports))
            self._supports.extend(completion.supports)

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append the environment's turn."""
        self._append(token_ids, TokenRole.ENVIRONMENT)

    def sequence(self) -> TokenSequence:
        """A copy of the tokens so far."""
        routes = encode_routes(np.concatenate(self._routes)) if self._routes else None
        supports = None
        if len(self._supports):
            self._supports.add(None, len(self) - len(self._supports))
            supports = encode_supports(self._supports.supports())
        return TokenSequence(
            list(self.token_ids), list(self._roles), list(self._logprobs), list(self._spans), routes, supports
        )

    def _append(self, token_ids: Sequence[int], role: TokenRole) -> None:
        self.token_ids += token_ids
        self._roles += [int(role)] * len(token_ids)
        self._logprobs += [None] * len(token_ids)

    def _add_span(self, version: str, start: int, end: int) -> None:
        if start < end:
            self._spans.append((version, start, end))


def policy_turns(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(start, end) of each run of policy and forced tokens, half open: the turns as they were sampled."""
    roles, turns, start = sequence.token_role, [], None
    for position, role in enumerate([*roles, int(TokenRole.ENVIRONMENT)]):
        own = role in (TokenRole.POLICY, TokenRole.FORCED)
        if own and start is None:
            start = position
        elif not own and start is not None:
            turns.append((start, position))
            start = None
    return turns
