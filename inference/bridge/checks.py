"""Checks of the messages of clients. Every refusal is a BadMessage that names the field and the fix."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from contracts.pb import bridge_pb2 as pb
from inference.bridge.errors import BadMessage
from inference.errors import RequestTooLong

_EPISODE_ID = re.compile(r"[0-9a-zA-Z_-]{16,64}")
_GROUP_ID = re.compile(r"[0-9a-zA-Z_-]{0,64}")
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Bounds of a temperature that is not 0."""
_MAX_STOPS = 64
_MAX_GRAMMAR = 1 << 20
"""Longest grammar of an episode, in characters."""
_MAX_LABELS = 4096
"""Longest labels of an episode, or components of its reward, in bytes of all keys and values."""
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class Limits:
    """What the policy takes."""

    vocabulary: int
    """Token ids are in [0, vocabulary); 0: unknown."""
    context_tokens: int
    """Longest context; 0: unknown."""

    def within(self, context_tokens: int) -> Limits:
        """The same with a context of at most so many tokens."""
        return replace(self, context_tokens=min(self.context_tokens or context_tokens, context_tokens))

    def check_ids(self, ids: bytes, field: str) -> int:
        """Number of the token ids in `ids`, little-endian int32. Raises BadMessage."""
        if len(ids) % _TOKEN_BYTES:
            raise BadMessage(f"{field} has {len(ids)} bytes: send little-endian int32, 4 bytes a token")
        if ids:
            tokens = np.frombuffer(ids, "<i4")
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or (self.vocabulary and high >= self.vocabulary):
                wrong = low if low < 0 else high
                bound = f"[0, {self.vocabulary})" if self.vocabulary else "0 and above"
                raise BadMessage(f"{field} has token {wrong}, the policy's are in {bound}: is it another tokenizer's?")
        return len(ids) // _TOKEN_BYTES

    def check_room(self, tokens: int, field: str) -> None:
        """Raise RequestTooLong if a context of `tokens` tokens leaves no room for another one."""
        if self.context_tokens and tokens >= self.context_tokens:
            raise RequestTooLong(
                f"{field} makes a context of {tokens} tokens, the policy's holds {self.context_tokens} and needs room"
                " for one more: shorten it, or end the episode"
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling parameters of a turn."""

    temperature: float
    max_tokens: int
    """0: as many as the context holds."""
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restricted:
    """What the turns of an episode are drawn from, if that is part of the vocabulary."""

    top_p: float
    grammar: str | None

    @classmethod
    def of(cls, message: pb.StartEpisodeRequest) -> Restricted | None:
        """That of a start; None: the whole vocabulary."""
        top_p = message.top_p or 1.0
        grammar = sys.intern(message.grammar) if message.grammar else None  # thousands of episodes have the same
        return cls(top_p, grammar) if grammar or top_p < 1 else None


def check_restricted(message: pb.StartEpisodeRequest) -> None:
    """Raise BadMessage unless top_p is from 0 to 1 and the grammar is empty or a JSON object within the size limit."""
    if not 0 <= message.top_p <= 1:  # nor NaN
        raise BadMessage(f"top_p={message.top_p}: must be above 0 and at most 1; 0 and 1 leave the whole vocabulary")
    if len(message.grammar) > _MAX_GRAMMAR:
        raise BadMessage(f"grammar has {len(message.grammar)} characters: at most {_MAX_GRAMMAR} are taken")
    try:
        tag = json.loads(message.grammar) if message.grammar else {}
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"grammar is not JSON ({error}): send a structural tag of xgrammar") from None
    if not isinstance(tag, dict):
        raise BadMessage("grammar is not a JSON object: send a structural tag of xgrammar")


def sampling_of(message: pb.Sampling, limits: Limits, *, hosted: bool = False) -> Sampling:
    """Sampling parameters of a message. hosted: with the temperature that was meant by the message's float32, as
    rollouts have it. Raises BadMessage.
    """
    temperature = message.temperature if message.HasField("temperature") else 1.0
    if hosted:
        temperature = float(str(np.float32(temperature)))
    if temperature != 0:
        check_temperature(temperature, "sampling.temperature")
    if message.max_tokens < 0:
        raise BadMessage(f"sampling.max_tokens={message.max_tokens}: must be 0 (what the context holds) or more")
    stops = tuple(message.stop_token_ids)
    if len(stops) > _MAX_STOPS:
        raise BadMessage(f"sampling.stop_token_ids has {len(stops)} tokens: at most {_MAX_STOPS} are allowed")
    if stops:
        limits.check_ids(np.array(stops, "<i4").tobytes(), "sampling.stop_token_ids")
    return Sampling(temperature, message.max_tokens, message.seed, stops)


def check_temperature(temperature: float, field: str) -> None:
    """Raise BadMessage for a temperature by which logits can't be divided."""
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise BadMessage(
            f"{field}={temperature:g}: must be from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, or 0 to sample greedily"
        )


def check_episode_id(episode_id: str) -> None:
    """Raise BadMessage for an invalid episode id."""
    if not _EPISODE_ID.fullmatch(episode_id):
        raise BadMessage(f"episode_id={episode_id[:80]!r}: must be 16 to 64 characters of [0-9a-zA-Z_-]")


def check_start(message: pb.StartEpisodeRequest, limits: Limits) -> Sampling:
    """Check everything about a start that does not depend on other episodes. Raises BadMessage, RequestTooLong."""
    check_episode_id(message.episode_id)
    if not _GROUP_ID.fullmatch(message.group_id):
        raise BadMessage(f"group_id={message.group_id[:80]!r}: must be at most 64 characters of [0-9a-zA-Z_-]")
    tokens = limits.check_ids(message.prompt_ids, "prompt_ids")
    if not tokens and not message.HasField("hosted"):
        raise BadMessage("prompt_ids is empty: the policy needs at least one token")
    limits.check_room(tokens, "prompt_ids")
    check_seconds(message.lease_s, "lease_s")
    check_restricted(message)
    if message.rule not in (pb.PINNED, pb.FOLLOW):
        raise BadMessage(f"rule={message.rule}: must be PINNED (0) or FOLLOW (1)")
    _check_size(message.labels.items(), "labels")
    return sampling_of(message.sampling, limits)


def check_end(message: pb.EndEpisodeRequest) -> None:
    """Raise BadMessage for rewards that are no numbers."""
    if message.HasField("reward") and not math.isfinite(message.reward):
        raise BadMessage(f"reward={message.reward}: must be a finite number; leave it out if there is none")
    for name, value in message.components.items():
        if not math.isfinite(value):
            raise BadMessage(f"components[{name[:80]!r}]={value}: must be a finite number")
    _check_size(((name, "12345678") for name in message.components), "components")


def check_seconds(seconds: float, field: str) -> None:
    """Raise BadMessage unless `seconds` is a finite number of 0 or more."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise BadMessage(f"{field}={seconds}: must be 0 or more seconds")


def _check_size(pairs: Iterable[tuple[str, str]], field: str) -> None:
    size = sum(len(name) + len(value) for name, value in pairs)
    if size > _MAX_LABELS:
        raise BadMessage(f"{field} have {size} characters: at most {_MAX_LABELS} are kept with an episode")
