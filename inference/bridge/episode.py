"""Data of one episode: its context, its turns, and who owns it. Holds no task and does no work."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from contracts.pb import bridge_pb2 as pb
from contracts.supports import SupportsWriter, decode_supports, encode_supports
from inference.bridge.checks import Restricted, Sampling
from inference.bridge.hosted.state import Hosted, Place

TOKEN_BYTES: Final = 4
"""Bytes of a token id (int32) and of a logprob (float32)."""
MESSAGE_TOKENS: Final = 16_384
"""Most tokens of one message, so that a client that reads nothing holds little."""


class Turn:
    """One turn of the policy, as places in its episode's context."""

    __slots__ = ("begin", "finish", "first", "logprob", "reply", "sampling", "spans", "tokens")

    def __init__(self, begin: int, first: int, logprob: int, sampling: Sampling | None) -> None:
        self.begin = begin
        """Place in the context of the turn's first observation token."""
        self.first = first
        """Place in the context of its first policy token."""
        self.logprob = logprob
        """Place of that token among all policy tokens of the episode."""
        self.sampling = sampling
        """Of this turn only; None: as at the episode's start."""
        self.tokens = 0
        """Policy tokens so far."""
        self.spans: list[tuple[str, int, int]] = []
        """(policy version, first, end) among this turn's policy tokens, contiguous and complete."""
        self.finish: int | None = None
        """pb.Finish; None until its last token was sampled."""
        self.reply: pb.StepEnd | None = None
        """What the environment of a hosted episode replied; None until it has."""

    def extend_span(self, version: str, count: int) -> None:
        """Note that `version` made the next `count` tokens."""
        first, self.tokens = self.tokens, self.tokens + count
        if self.spans and self.spans[-1][0] == version:
            version, first, _ = self.spans.pop()
        self.spans.append((version, first, self.tokens))


class Episode:
    """One episode. Ids and logprobs are in two byte strings, so that thousands of episodes stay small."""

    __slots__ = (
        "ended",
        "expired",
        "expires",
        "forced",
        "group_id",
        "handle",
        "hosted",
        "identity",
        "ids",
        "labels",
        "lease_s",
        "log_mass",
        "logprobs",
        "owner",
        "restricted",
        "rule",
        "sampling",
        "started_as",
        "supports",
        "turns",
        "version",
    )

    def __init__(
        self,
        owner: str,
        start: pb.StartEpisodeRequest,
        sampling: Sampling,
        version: str,
        lease_s: float,
        handle: int,
    ) -> None:
        """owner: name of the key that sees it. version: the policy at its start. handle: its number in the journal."""
        self.owner, self.identity, self.group_id = owner, start.episode_id, start.group_id
        self.handle = handle
        self.rule, self.version, self.sampling = start.rule, version, sampling
        self.labels: dict[str, str] | None = dict(start.labels) or None
        self.started_as = content_of(start)
        """Digest of the request that started it."""
        self.hosted = Hosted(start.hosted, Place(time.time())) if start.HasField("hosted") else None
        """The environment's side; None: the client plays it."""
        self.lease_s = lease_s
        self.expires = 0.0
        """When its lease ends, on the monotonic clock."""
        self.ids = bytearray(start.prompt_ids)
        """The whole context, little-endian int32."""
        self.logprobs = bytearray()
        """Of the policy tokens, in order, little-endian float32."""
        self.restricted = Restricted.of(start)
        """What its turns are drawn from; None: the whole vocabulary."""
        self.supports = SupportsWriter() if self.restricted else None
        """Of the policy tokens, in order."""
        self.forced = bytearray()
        """Of the policy tokens where `restricted`, a byte each: 1 where the grammar left no other."""
        self.log_mass = bytearray()
        """Log of each support's share of the distribution, float32, per policy token; empty unless `restricted`."""
        self.turns: list[Turn] = []
        self.ended: pb.EndEpisodeRequest | None = None
        self.expired = False

    @property
    def phase(self) -> str:
        """open, stepping, ended or expired."""
        if self.ended is not None:
            return "ended"
        if self.expired:
            return "expired"
        return "open" if self.is_settled else "stepping"

    @property
    def is_settled(self) -> bool:
        """Whether its last turn, if there is one, is complete: its tokens, and where hosted the environment's reply."""
        return not self.turns or self.is_over(self.turns[-1])

    def is_over(self, turn: Turn) -> bool:
        """Whether a turn is complete."""
        return turn.finish is not None and (self.hosted is None or turn.reply is not None)

    @property
    def holds_sandbox(self) -> bool:
        """Whether there may be a sandbox of it."""
        return self.hosted is not None and self.hosted.place.held

    @property
    def is_open(self) -> bool:
        """Whether it is neither ended nor expired."""
        return self.ended is None and not self.expired

    @property
    def tokens(self) -> int:
        """Length of the context."""
        return len(self.ids) // TOKEN_BYTES

    def begin_turn(self, observation: bytes, sampling: Sampling | None) -> Turn:
        """Append the environment's tokens and begin a turn after them."""
        begin = self.tokens
        self.ids += observation
        turn = Turn(begin, self.tokens, len(self.logprobs) // TOKEN_BYTES, sampling)
        self.turns.append(turn)
        return turn

    def add_tokens(self, version: str, ids: bytes, logprobs: bytes, drawn: bytes = b"") -> None:
        """Append tokens of the policy to the last turn. drawn: where `restricted`, `forced` of each, then `log_mass`
        of each, then their encoded supports.
        """
        self.ids += ids
        self.logprobs += logprobs
        if self.supports is not None:
            count = len(ids) // TOKEN_BYTES
            forced, log_mass, supports = split_drawn(drawn, count)
            self.forced += forced
            self.log_mass += log_mass
            self.supports.extend(decode_supports(supports))
        self.turns[-1].extend_span(version, len(ids) // TOKEN_BYTES)

    def policy_ids(self, turn: Turn) -> bytes:
        """The policy's tokens of a turn."""
        return bytes(memoryview(self.ids)[turn.first * TOKEN_BYTES : (turn.first + turn.tokens) * TOKEN_BYTES])

    @property
    def prompt(self) -> bytes:
        """The tokens before the first turn."""
        return bytes(memoryview(self.ids)[: self.turns[0].begin * TOKEN_BYTES if self.turns else len(self.ids)])

    def observation_of(self, turn: Turn) -> bytes:
        """The environment's tokens before a turn."""
        return bytes(memoryview(self.ids)[turn.begin * TOKEN_BYTES : turn.first * TOKEN_BYTES])

    def drawn(self, first: int, last: int) -> bytes:
        """What `add_tokens` was given as `drawn`, of the policy tokens [first, last) of the whole episode."""
        if self.supports is None:
            return b""
        supports = self.supports.supports().between(first, last)
        log_mass = memoryview(self.log_mass)[first * TOKEN_BYTES : last * TOKEN_BYTES]
        return b"".join((memoryview(self.forced)[first:last], log_mass, encode_supports(supports)))

    def fill_tokens(self, message: pb.Tokens, turn: Turn, first: int) -> int:
        """Fill a message with the policy tokens of a turn from place `first` to the newest, or as many as one message
        takes, and return the place after them.
        """
        last = min(turn.tokens, first + MESSAGE_TOKENS)
        low, high = (turn.first + first) * TOKEN_BYTES, (turn.first + last) * TOKEN_BYTES
        start, stop = (turn.logprob + first) * TOKEN_BYTES, (turn.logprob + last) * TOKEN_BYTES
        message.first = first
        message.ids = bytes(memoryview(self.ids)[low:high])
        message.logprobs = bytes(memoryview(self.logprobs)[start:stop])
        if self.supports is not None:
            drawn = self.drawn(turn.logprob + first, turn.logprob + last)
            message.forced, message.log_mass, message.supports = split_drawn(drawn, last - first)
        for version, begin, end in turn.spans:
            if begin < last and end > first:
                message.spans.add(version=version, first=max(begin, first), end=min(end, last))
        return last

    def transcript_digest(self) -> str:
        """SHA-256 of the ids of the whole context, as little-endian int32, in hex digits."""
        return hashlib.sha256(self.ids).hexdigest()

    def expire(self) -> None:
        """Free what the episode holds."""
        self.expired = True
        self.ids, self.logprobs, self.labels = bytearray(), bytearray(), None
        self.forced, self.log_mass, self.supports = bytearray(), bytearray(), None
        self.turns.clear()
        if self.hosted is not None:
            self.hosted.replied()
            self.hosted.final = None


def split_drawn(drawn: bytes, count: int) -> tuple[bytes, bytes, bytes]:
    """`forced`, `log_mass` and encoded supports of `count` tokens, from what `Episode.drawn` gives."""
    end = count * (1 + TOKEN_BYTES)
    return drawn[:count], drawn[count:end], drawn[end:]


def bytes_of(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.array(ids, "<i4").tobytes()


def ids_of(data: bytes) -> list[int]:
    """Token ids of little-endian int32."""
    return np.frombuffer(data, "<i4").tolist()  # type: ignore[no-any-return]


def content_of(start: pb.StartEpisodeRequest) -> bytes:
    """Digest of a start, by which a repeated one is recognized."""
    return hashlib.sha256(start.SerializeToString(deterministic=True)).digest()
