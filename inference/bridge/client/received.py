"""Tokens of one turn, as they come."""

from __future__ import annotations

import numpy as np

from contracts.errors import SchemaError
from contracts.pb import bridge_pb2 as pb
from contracts.supports import SupportsWriter, decode_supports
from inference.bridge.client.errors import TokensChanged
from inference.bridge.client.tokens import FINISHES, Piece, Span, Turn, ids_of, logprobs_of, reply_of
from inference.bridge.errors import BridgeError

OVERLAP = 32
"""Tokens that a client has and asks for again after a lost connection: a bridge that lost some, and sampled others in
their place, does not go unnoticed.
"""
_TOKEN_BYTES = 4


class Received:
    """What a client has of one turn. Tokens that come again must be those that came before."""

    __slots__ = (
        "_forced",
        "_ids",
        "_log_mass",
        "_logprobs",
        "_spans",
        "_supports",
        "count",
        "episode_id",
        "observation",
        "step",
    )

    def __init__(self, episode_id: str, step: int, observation: bytes) -> None:
        """observation: environment tokens before the turn, little-endian int32."""
        self.episode_id, self.step, self.observation = episode_id, step, observation
        self.count = 0
        """Tokens so far."""
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._spans: list[Span] = []
        self._forced: list[bytes] = []
        self._log_mass: list[bytes] = []
        self._supports: SupportsWriter | None = None

    @property
    def asked_from(self) -> int:
        """From which token on the rest is asked for: those before are known."""
        return max(0, self.count - OVERLAP)

    def add(self, tokens: pb.Tokens) -> None:
        """Take consecutive tokens; those that are here already are compared.

        Raises TokensChanged, and BridgeError for tokens that leave a gap.
        """
        first, ids, logprobs = tokens.first, tokens.ids, tokens.logprobs
        if first > self.count or len(ids) != len(logprobs) or len(ids) % _TOKEN_BYTES:
            raise BridgeError(
                f"{self._name}: the bridge sent {len(ids)} bytes of ids and {len(logprobs)} of logprobs from token"
                f" {first} on, after {self.count} tokens: report it as a bug of the bridge"
            )
        again = 0
        if first < self.count:
            again = min(len(ids) // _TOKEN_BYTES, self.count - first)
            self._compare(first, again, ids, logprobs)
            ids, logprobs = ids[again * _TOKEN_BYTES :], logprobs[again * _TOKEN_BYTES :]
        if not ids:
            return
        known, self.count = self.count, self.count + len(ids) // _TOKEN_BYTES
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        if tokens.supports:
            self._add_supports(tokens, again)
        for span in tokens.spans:
            if span.end > known:
                self._add_span(span.version, max(span.first, known), span.end)

    def turn(self, end: pb.StepEnd, *, hosted: bool) -> Turn:
        """The whole turn. hosted: with the environment's reply.

        Raises BridgeError if its end has another number of tokens."""
        if end.tokens != self.count:
            raise BridgeError(
                f"{self._name}: the bridge ended it after {end.tokens} tokens, and sent {self.count}: report it as a"
                " bug of the bridge"
            )
        ids, logprobs = self._whole()
        return Turn(
            self.step,
            ids_of(self.observation),
            ids_of(ids),
            logprobs_of(logprobs),
            tuple(self._spans),
            FINISHES[end.finish],
            reply_of(end) if hosted else None,
            None if self._supports is None else self._supports.supports(),
            None if self._supports is None else np.frombuffer(b"".join(self._forced), np.bool_),
            None if self._supports is None else logprobs_of(b"".join(self._log_mass)),
        )

    def piece(self, first: int) -> Piece:
        """All tokens from place `first` on."""
        ids, logprobs = self._whole()
        return Piece(first, ids_of(ids)[first:], logprobs_of(logprobs)[first:])

    @property
    def _name(self) -> str:
        return f"step {self.step} of episode {self.episode_id}"

    def _whole(self) -> tuple[bytes, bytes]:
        if len(self._ids) != 1:
            self._ids, self._logprobs = [b"".join(self._ids)], [b"".join(self._logprobs)]
        return self._ids[0], self._logprobs[0]

    def _add_supports(self, tokens: pb.Tokens, again: int) -> None:
        """Take the supports of tokens, but of the first `again`. Raises BridgeError for those of other tokens."""
        count = len(tokens.ids) // _TOKEN_BYTES
        try:
            supports = decode_supports(tokens.supports)
            fault = supports.fault(ids_of(tokens.ids), 1 << 31)
        except SchemaError as error:
            fault = str(error)
        if len(tokens.forced) != count or len(tokens.log_mass) != count * _TOKEN_BYTES:
            fault = fault or f"{len(tokens.forced)} bytes of forced and {len(tokens.log_mass)} of log_mass"
        if fault:
            raise BridgeError(
                f"{self._name}: the bridge sent supports that are not of its {count} tokens ({fault}): report it as a"
                " bug of the bridge"
            )
        self._supports = self._supports or SupportsWriter()
        self._supports.extend(supports.between(again, count))
        self._forced.append(tokens.forced[again:])
        self._log_mass.append(tokens.log_mass[again * _TOKEN_BYTES :])

    def _add_span(self, version: str, first: int, end: int) -> None:
        if self._spans and self._spans[-1].version == version:
            first = self._spans.pop().first
        self._spans.append(Span(version, first, end))

    def _compare(self, first: int, count: int, ids: bytes, logprobs: bytes) -> None:
        known_ids, known_logprobs = self._whole()
        place = slice(first * _TOKEN_BYTES, (first + count) * _TOKEN_BYTES)
        size = count * _TOKEN_BYTES
        if known_ids[place] == ids[:size] and known_logprobs[place] == logprobs[:size]:
            return
        had, now = ids_of(known_ids[place]), ids_of(ids[:size])
        had_logprobs, now_logprobs = logprobs_of(known_logprobs[place]), logprobs_of(logprobs[:size])
        differing = (had != now) | (had_logprobs.view("<i4") != now_logprobs.view("<i4"))
        at = int(differing.argmax())
        raise TokensChanged(
            f"{self._name}: token {first + at} was {had[at]} (logprob {had_logprobs[at]}) and is now {now[at]}"
            f" ({now_logprobs[at]}): the bridge lost what it had sent; abort the episode and start another one"
        )
