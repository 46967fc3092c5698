"""Growing tokens of one context: appended by their source, never tokenized again."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.episodes import TokenRole, TokenSequence
from inference.engines.base import Completion


class Transcript:
    """Token ids with roles, logprobs and policy spans, all of equal length."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        """What the engine is asked to continue."""
        self._roles: list[int] = []
        self._logprobs: list[float | None] = []
        self._spans: list[tuple[str, int, int]] = []
        self._append(prompt_ids, TokenRole.PROMPT)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_policy(self, completion: Completion) -> None:
        """Append what the policy sampled, its stop token included."""
        start = len(self)
        for version, first, last in completion.spans:
            self._add_span(version, start + first, start + last)
        self.token_ids += completion.token_ids
        self._roles += [int(TokenRole.POLICY)] * len(completion.token_ids)
        self._logprobs += completion.logprobs

    def add_environment(self, token_ids: Sequence[int]) -> None:
        """Append the environment's turn."""
        self._append(token_ids, TokenRole.ENVIRONMENT)

    def sequence(self) -> TokenSequence:
        """A copy of the tokens so far."""
        return TokenSequence(list(self.token_ids), list(self._roles), list(self._logprobs), list(self._spans))

    def _append(self, token_ids: Sequence[int], role: TokenRole) -> None:
        self.token_ids += token_ids
        self._roles += [int(role)] * len(token_ids)
        self._logprobs += [None] * len(token_ids)

    def _add_span(self, version: str, start: int, end: int) -> None:
        if start < end:
            self._spans.append((version, start, end))


def policy_turns(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(start, end) of each run of policy tokens, half open: the turns as they were sampled."""
    roles, turns, start = sequence.token_role, [], None
    for position, role in enumerate([*roles, int(TokenRole.ENVIRONMENT)]):
        if role == TokenRole.POLICY and start is None:
            start = position
        elif role != TokenRole.POLICY and start is not None:
            turns.append((start, position))
            start = None
    return turns
