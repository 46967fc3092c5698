"""Loads of the `routing` benchmark, and what they need at least."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.errors import ConfigError

BLOCK = 16
"""Tokens of a block."""
MOST = 2048
"""max_tokens of each request: routers don't know how long an answer becomes."""
_TRACE_BLOCK = 512
"""Tokens of a block of a trace."""
_VOCABULARY = 1 << 20
_DIGITS = "0123456789abcdefghijklmnopqrstuv"


@dataclass(frozen=True)
class Turn:
    """One request. Its prompt is that of the turn before, what was sampled, and `tokens`."""

    tokens: Sequence[int]
    sampled: int


@dataclass(frozen=True)
class Conversation:
    """Requests, each sent when the one before is answered."""

    name: str
    key: str
    """Key for consistent hashing: conversations with the same key begin with the same tokens."""
    turns: Sequence[Turn]
    start_s: float = 0.0
    """Simulated seconds."""
    named: bool = False
    """Whether the client names session and group in headers."""


def answer(conversation: str, turn: int, count: int) -> list[int]:
    """Tokens that every replica samples, so that all routers get the same prompts."""
    drawn = np.random.default_rng([int.from_bytes(conversation.encode()[:16], "little"), turn])
    return [int(token) for token in drawn.integers(0, _VOCABULARY, count)]


def group_load(groups: int, members: int, turns: int, prompt: int) -> list[Conversation]:
    """Groups of episodes that share their prompt. Lengths are lognormal: a few members are much longer than others."""
    drawn = np.random.default_rng(5)
    found = []
    for group in range(groups):
        shared = drawn.integers(0, _VOCABULARY, prompt).tolist()
        for member in range(members):
            lengths = np.clip(drawn.lognormal(4.6, 0.9, turns), 8, MOST).astype(int)
            tools = [drawn.integers(0, _VOCABULARY, 64).tolist() for _ in range(turns - 1)]
            made = [Turn(tokens, int(length)) for tokens, length in zip([shared, *tools], lengths, strict=True)]
            found.append(Conversation(f"{group}-{member}", f"group {group}", made, named=True))
    return found


def trace_load(path: Path, requests: int, shrink: int) -> list[Conversation]:
    """The first requests of a Mooncake trace, each of its own, with all lengths divided by `shrink`.

    Raises ConfigError for a file that is none.
    """
    found = []
    try:
        with path.open() as lines:
            for number, line in zip(range(requests), lines, strict=False):
                row = json.loads(line)
                width = _TRACE_BLOCK // shrink
                tokens = [token for each in row["hash_ids"] for token in _block(each, width)]
                turn = Turn(tokens[: max(1, row["input_length"] // shrink)], max(1, row["output_length"] // shrink))
                key = str(row["hash_ids"][:2])
                found.append(Conversation(f"request {number}", key, [turn], row["timestamp"] / 1000))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--trace {path} is no trace of Mooncake ({error}): name a .jsonl file of its traces"
        ) from None
    return found


_PAIRS = tuple(f"{high}{low}" for high in _DIGITS for low in _DIGITS)


def text_of(tokens: Iterable[int]) -> str:
    """Tokens as a text of four characters each, which every router understands: digits of base 32."""
    return "".join(_PAIRS[token >> 10] + _PAIRS[token & 1023] for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Inverse of `text_of`."""
    return [int(text[start : start + 4], 32) for start in range(0, len(text), 4)]


def _block(name: int, width: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(name).integers(0, _VOCABULARY, width)]


def block_keys(tokens: Sequence[int]) -> list[int]:
    """Names of the prefixes that end with each whole block."""
    keys, parent = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        parent = hash((parent, tuple(tokens[end - BLOCK : end])))
        keys.append(parent)
    return keys


@dataclass(frozen=True)
class Least:
    """What a load needs at least."""

    computed: int
    """Prompt tokens that one cache without end computes."""
    seconds: float
    """Simulated: no replicas are faster than their share of the work, nor than the longest conversation."""


def least(load: Iterable[Conversation], replicas: int, prefill: float, decode: float, slots: int) -> Least:
    """Bounds of a load. prefill: tokens/s of a replica; decode: tokens/s of one of its `slots` sequences."""
    known: set[int] = set()
    computed = sampled = 0
    longest = 0.0
    for talk in load:
        tokens, seconds = list[int](), talk.start_s
        for place, turn in enumerate(talk.turns):
            tokens += turn.tokens
            keys = block_keys(tokens)
            cached = next((at for at, key in enumerate(keys) if key not in known), len(keys)) * BLOCK
            computed += len(tokens) - cached
            tokens += answer(talk.name, place, turn.sampled)
            known.update(block_keys(tokens))
            sampled += turn.sampled
            seconds += turn.sampled / decode
        longest = max(longest, seconds)
    work = max(computed / prefill, sampled / decode / slots)
    return Least(computed, max(work / replicas, longest))
