"""Interface of all engines: token ids in; token ids, log probabilities and the policy version of each out.

`generate` returns a completion at its end, `stream` its tokens while they are sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from contracts.episodes import HIGHEST_LOGPROB
from contracts.routing import Routes
from contracts.supports import Supports, SupportsWriter
from inference.errors import EngineError

LOOK_S = 1.0
"""Seconds between two looks whether an engine has failed."""
LOWEST_LOGPROB = float(np.finfo(np.float32).min)
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling one completion."""

    temperature: float
    """0 is greedy; else logits are divided by it. Logprobs are those of the sampling distribution, or of temperature 1
    if greedy.
    """
    max_tokens: int
    """Maximum tokens to generate, at least 1."""
    seed: int
    """The random number of the token at absolute position p depends only on (seed, p), never on the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion and keeps it as the last token."""
    routing_from: int | None = None
    """First position of the context whose chosen experts are returned, at most the prompt's length. None: none are."""
    group: str | None = None
    """Name of requests with a common prompt, which are best sent to one replica. Changes no token."""
    top_p: float = 1.0
    """Sample from the most probable tokens whose probabilities add up to at least this; above 0, 1: from all."""
    grammar: str | None = None
    """Structural tag of xgrammar as JSON text, which the completion follows, see `inference.grammar`. None: none.

    With this or `top_p`, logprobs are those over the tokens that remain.
    """
    begun: int = 0
    """Number of tokens at the prompt's end that the grammar begins with: the completion goes on after them."""

    @property
    def restricted(self) -> bool:
        """Whether tokens are sampled from part of the vocabulary."""
        return self.grammar is not None or self.top_p < 1.0


@dataclass(frozen=True)
class Completion:
    """Sampled tokens of one request."""

    token_ids: list[int]
    """New tokens only, including the stop token."""
    logprobs: list[float]
    """One per token, natural logarithm, float32 values."""
    spans: list[tuple[str, int, int]]
    """(policy version, start, end) within `token_ids`, contiguous and complete; more than one after a hot reload."""
    finish_reason: FinishReason
    routed_experts: Routes | None = field(default=None, compare=False)
    """Experts chosen at each position from `routing_from` to the last but one, since the last token was not fed. None
    unless requested, and from engines that do not return them.
    """
    supports: Supports | None = field(default=None, compare=False)
    """What each token was drawn from, if sampling was restricted; None: all were drawn from the whole vocabulary."""
    forced: list[bool] | None = None
    """Whether the grammar left no other token, for each token; None: it always did."""
    log_mass: list[float] | None = None
    """With supports: log of each support's probability under the whole distribution, at most 0, float32 values. A
    token's logprob plus this is its log probability under the whole distribution. None if the engine does not tell.
    """


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one completion. All pieces of a stream, in order, are the completion.

    A piece without tokens says that sampling has begun, from an engine that holds tokens back until their version is
    proven, or that it has ended.
    """

    token_ids: npt.NDArray[np.int32]
    """[n] new tokens."""
    logprobs: npt.NDArray[np.float32]
    """[n], as those of a completion."""
    spans: list[tuple[str, int, int]]
    """(policy version, start, end) within this piece's `token_ids`, contiguous and complete."""
    finish_reason: FinishReason | None = None
    """Of the completion; given with the last piece and only there."""
    supports: Supports | None = None
    """As those of a completion."""
    forced: list[bool] | None = None
    """As those of a completion."""
    log_mass: list[float] | None = None
    """As those of a completion."""


class Engine(Protocol):
    """Serves a policy. Safe to call from many tasks of one event loop; canceling a call frees its resources."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Continue `prompt_ids`.

        Raises RequestTooLong if the prompt leaves no room for a token. A full context ends the completion with
        "length".
        """

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """Continue `prompt_ids`, as `generate` does, and yield the tokens while they are sampled.

        Closing the generator frees its resources. Raises what `generate` raises, and EngineError for `routing_from`,
        whose record pieces do not carry.
        """

    def streams(self, params: SamplingParams) -> bool:
        """Whether `stream` yields its first piece as soon as the first token of such a request is sampled."""

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token given the previous ones; index 0 is 0.0. temperature: above 0."""

    async def load_weights(self, directory: Path, version: str) -> None:
        """Serve the checkpoint in `directory` from now on. Requests in flight continue; their later tokens have
        `version`. If that fails, the former policy is served again, which may have to be loaded first.
        """

    async def version(self) -> str:
        """Policy version of the next token."""

    async def close(self) -> None:
        """Stop serving; requests in flight end with "abort". Idempotent."""


class StreamsWhole:
    """Default of `Engine.stream` for engines whose servers answer whole completions: one piece, at the end."""

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return False

    async def stream(self: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream."""
        check_streamable(params)
        yield piece_of(await self.generate([int(token) for token in prompt_ids], params))


def piece_of(made: Completion) -> Piece:
    """A whole completion as the only, or last, piece of a stream."""
    tokens, logprobs = np.array(made.token_ids, np.int32), np.array(made.logprobs, np.float32)
    return Piece(tokens, logprobs, made.spans, made.finish_reason, made.supports, made.forced, made.log_mass)


def empty_piece(reason: FinishReason | None = None) -> Piece:
    """A piece without tokens: sampling has begun, or ended for this reason."""
    return Piece(np.zeros(0, np.int32), np.zeros(0, np.float32), [], reason)


async def collect(pieces: AsyncGenerator[Piece]) -> Completion:
    """The completion that the pieces of a stream are. Raises EngineError for a stream without an end."""
    tokens, logprobs, spans = list[int](), list[float](), list[tuple[str, int, int]]()
    forced, supports, masses = list[bool](), SupportsWriter(), list[float]()
    async with aclosing(pieces):
        async for piece in pieces:
            for version, start, end in piece.spans:
                begin = len(tokens) + start
                if spans and spans[-1][0] == version:
                    begin = spans.pop()[1]
                spans.append((version, begin, len(tokens) + end))
            tokens += piece.token_ids.tolist()
            logprobs += piece.logprobs.tolist()
            forced += piece.forced or [False] * len(piece.token_ids)
            if piece.supports is not None:
                supports.extend(piece.supports)
            masses += piece.log_mass or []
            if piece.finish_reason is not None:
                drawn = supports.supports() if len(supports) else None
                inserted = forced if any(forced) else None
                known = masses if masses and len(masses) == len(tokens) else None
                return Completion(tokens, logprobs, spans, piece.finish_reason, None, drawn, inserted, known)
    raise EngineError(f"the engine's stream ended after {len(tokens)} tokens without a finish reason")


def check_streamable(params: SamplingParams) -> None:
    """Raise EngineError for parameters that a stream can't serve."""
    if params.routing_from is not None:
        raise EngineError("routing is requested of a stream, whose pieces do not carry it: use generate")


def check_sampled(
    made: Completion | Piece, most: int, vocabulary: int = 0, stops: Collection[int] | None = None
) -> None:
    """Raise EngineError unless sampling at most `most` tokens can give this: ids are in [0, vocabulary), finite
    log probabilities at most 0 but for rounding, and spans cover all tokens. vocabulary: 0 for unknown. stops: those of
    a whole completion, which has a token unless it was aborted, and "stop" as its reason only after one of these.
    """
    count, size, fault = len(made.token_ids), vocabulary or 1 << 31, None
    last = int(made.token_ids[-1]) if count else None
    if count > most:
        fault = f"{count} tokens of {most} requested ones"
    elif not _are_within(made.token_ids, "i", 0, size - 1):
        fault = f"token ids that are not in [0, {size})"
    elif len(made.logprobs) != count or not _are_within(made.logprobs, "fi", LOWEST_LOGPROB, HIGHEST_LOGPROB):
        fault = f"log probabilities of {count} tokens that are not {count} finite numbers of at most 0"
    elif not cover(made.spans, count):
        fault = f"policy versions that do not cover its {count} tokens"
    elif stops is not None and made.finish_reason == "stop" and last not in stops:
        fault = f"{count} tokens that end with {last}, and not with a stop token of the request, as the reason is stop"
    elif stops is not None and made.finish_reason != "abort" and not count:
        fault = "no token"
    if fault is not None:
        raise EngineError(f"the engine returned {fault}, which sampling can't give: check its server, or replace it")


def cover(spans: Sequence[tuple[str, int, int]], count: int) -> bool:
    """Whether spans (version, start, end) are contiguous and cover `count` tokens."""
    bounds = [0, *(end for _, _, end in spans)]
    return bounds == sorted(bounds) and bounds == [*(start for _, start, _ in spans), count]


def _are_within(values: Sequence[float] | npt.NDArray[Any], kinds: str, lowest: float, highest: float) -> bool:
    """Whether all values are in [lowest, highest]. kinds: NumPy's, of their type."""
    try:
        found = np.asarray(values)
    except ValueError:  # lists of several lengths
        return False
    if found.ndim != 1 or not len(found):
        return found.ndim == 1
    return found.dtype.kind in kinds and bool(((found >= lowest) & (found <= highest)).all())


async def watch(check: Callable[[], Awaitable[object]]) -> NoReturn:
    """Raise the error of an engine that has failed for good: only another process can serve again.

    check: raises it, such as `Engine.version` of an engine of this process.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        await check()


def require_grammar_from_start(params: SamplingParams, server: str) -> None:
    """Raise EngineError for a completion whose grammar has begun: this server starts grammars at its first token."""
    if params.grammar is not None and params.begun:
        raise EngineError(
            f"{server} can't go on with a completion that its grammar has begun: sample it from the start"
        )


def require_unrestricted(params: SamplingParams, kind: str) -> None:
    """Raise EngineError for restricted sampling, by an engine of this kind, which returns no supports."""
    if params.restricted:
        raise EngineError(
            f"the engine {kind} does not return what tokens were drawn from under a grammar or top_p: use the built-in"
            " engine, or leave rollouts.grammar and rollouts.top_p out"
        )
