"""Requests and their replies, and the table of the scheduler's sequences."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from contracts.routing import Routes, routes_dtype
from inference.engines.base import Completion, FinishReason, Piece, SamplingParams
from inference.engines.prefix_cache import Prefix
from inference.engines.restricted import Restriction

Integers = npt.NDArray[np.int64]


class Reply(Protocol):
    """Where results of a request go. Used in the caller's event loop only."""

    def give(self, result: Any) -> None:
        """Pass on a result."""

    def fail(self, error: Exception) -> None:
        """End the request with an error."""


class Answer:
    """Reply with one result, to be awaited as `future`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()

    def give(self, result: Any) -> None:
        """See Reply.give."""
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """See Reply.fail."""
        if not self.future.done():
            self.future.set_exception(error)


class Pieces:
    """Reply with several pieces, to be taken by `next`."""

    def __init__(self) -> None:
        self._given: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    def give(self, result: Any) -> None:
        """See Reply.give."""
        self._given.put_nowait(result)

    def fail(self, error: Exception) -> None:
        """See Reply.fail."""
        self._given.put_nowait(error)

    async def next(self) -> Piece:
        """Wait for the next piece, or raise the error that ended the request."""
        given = await self._given.get()
        if isinstance(given, Exception):
            raise given
        return given


@dataclass(eq=False)
class Request:
    """Call of `generate`, `stream` or `score`, passed from the event loop's thread to the engine's."""

    kind: Literal["generate", "score"]
    tokens: npt.NDArray[np.int64]
    params: SamplingParams
    reply: Reply
    loop: asyncio.AbstractEventLoop
    streams: bool = False
    """Whether tokens are delivered while they are sampled, as `Piece`; else at the end, as `Completion`."""
    sent: int = 0
    """Sampled tokens that were delivered already."""
    cancelled: bool = False
    """Set by the event loop's thread, read by the engine's."""
    shared: bool = False
    """Whether other requests with the same prompt wait for its state."""
    followed: bool = False
    """Whether it has waited for another request's state; it never waits twice."""
    learned: int = 0
    """Tokens that later guesses can use already."""
    restriction: Restriction | None = None
    """Grammar and top_p, if it has any. Used in the engine's thread."""
    marks: list[tuple[str, int]] = field(default_factory=list)
    """(version, tokens generated before the version changed), the first at admission."""

    @property
    def routing(self) -> bool:
        """Whether the caller wants the chosen experts."""
        return self.params.routing_from is not None

    def completion(
        self, tokens: list[int], logprobs: list[float], reason: FinishReason, routes: Routes | None = None
    ) -> Completion:
        """Result of the finished call, with the spans of its versions."""
        spans = self._spans(0, len(tokens))
        if self.restriction is None:
            return Completion(tokens, logprobs, spans, reason, routes)
        return Completion(tokens, logprobs, spans, reason, routes, *self.restriction.records())

    def piece(self, tokens: Integers, logprobs: npt.NDArray[np.float32], reason: FinishReason | None) -> Piece:
        """The tokens after those that were delivered, which count as delivered now."""
        first, self.sent = self.sent, self.sent + len(tokens)
        spans = [(version, start - first, end - first) for version, start, end in self._spans(first, self.sent)]
        drawn = self.restriction.records(first) if self.restriction is not None else ()
        return Piece(tokens.astype(np.int32), logprobs.copy(), spans, reason, *drawn)

    def _spans(self, first: int, last: int) -> list[tuple[str, int, int]]:
        """(version, start, end) of the sampled tokens [first, last)."""
        ends = [*(start for _, start in self.marks[1:]), last][: len(self.marks)]
        cut = [
            (version, max(start, first), min(end, last)) for (version, start), end in zip(self.marks, ends, strict=True)
        ]
        return [(version, start, end) for version, start, end in cut if end > start]


class SequenceTable:
    """State of the sequence in each slot, as columns. Grows with the cache."""

    def __init__(self, routing: tuple[int, int], experts: int, stops: int = 4) -> None:
        """routing: (layers, experts per token). experts: of each layer."""
        self.requests: list[Request] = []
        self.tokens = np.zeros((0, 0), np.int64)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.length = np.zeros(0, np.int64)
        """Number of tokens, prompt and sampled."""
        self.cached = np.zeros(0, np.int64)
        """Number of tokens with keys and values in the cache."""
        self.limit = np.zeros(0, np.int64)
        """Length at which the completion ends."""
        self.seed = np.zeros(0, np.uint64)
        self.temperature = np.zeros(0, np.float32)
        self.stops = np.zeros((0, stops), np.int64)
        """Stop tokens, padded with -1."""
        self.routes: Routes = np.zeros((0, 0, *routing), routes_dtype(experts))
        """Chosen experts of each position, for requests that want them; empty until there is one."""
        self.routed = np.zeros(0, np.int64)
        """Number of tokens with routing. A position keeps its first routing, with which its successor was sampled."""

    def reserve(self, slots: int, length: int, stops: int, *, routing: bool = False) -> None:
        """Make room for `slots` sequences of `length` tokens with `stops` stop tokens each, and for their routing."""
        self.tokens = _grown(self.tokens, (slots, length))
        self.logprobs = _grown(self.logprobs, (slots, length))
        self.stops = _grown(self.stops, (slots, stops), fill=-1)
        for name in ("length", "cached", "limit", "seed", "temperature", "routed"):
            setattr(self, name, _grown(getattr(self, name), (slots,)))
        if routing or self.routes.size:
            self.routes = _grown(self.routes, (slots, length, *self.routes.shape[2:]))

    def add(self, request: Request, limit: int, prefix: Prefix | None, seed: int) -> int:
        """Put `request`, whose state begins with `prefix`, into the next slot and return it."""
        slot, count = len(self.requests), len(request.tokens)
        self.requests.append(request)
        self.tokens[slot, :count] = request.tokens
        cached = 0 if prefix is None else len(prefix.tokens)
        self.length[slot], self.cached[slot], self.limit[slot] = count, cached, limit
        self.routed[slot] = 0
        if prefix is not None and prefix.routes is not None:
            self.routes[slot, :cached], self.routed[slot] = prefix.routes, cached
        self.seed[slot], self.temperature[slot] = seed, request.params.temperature
        self.stops[slot] = -1
        self.stops[slot, : len(request.params.stop_token_ids)] = request.params.stop_token_ids
        return slot

    def record(self, slots: Integers, positions: Integers, routes: Routes) -> None:
        """Record the routing [tokens, layers, experts per token] of tokens at these places, unless they have one."""
        fresh = positions >= self.routed[slots]
        self.routes[slots[fresh], positions[fresh]] = routes[fresh]
        np.maximum.at(self.routed, slots, positions + 1)

    def routing_of(self, slot: int, start: int, stop: int) -> Routes | None:
        """Routing of a slot's positions [start, stop), if its request wants any."""
        return self.routes[slot, start:stop].copy() if self.requests[slot].routing else None

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` over slot `target`."""
        self.requests[target] = self.requests[source]
        for column in (
            self.tokens,
            self.logprobs,
            self.length,
            self.cached,
            self.limit,
            self.seed,
            self.temperature,
            self.stops,
            self.routed,
        ):
            column[target] = column[source]
        if self.requests[source].routing:
            self.routes[target, : self.routed[source]] = self.routes[source, : self.routed[source]]


def _grown(column: npt.NDArray[Any], size: tuple[int, ...], fill: int = 0) -> npt.NDArray[Any]:
    if all(have >= want for have, want in zip(column.shape, size, strict=True)):
        return column
    larger = np.full([max(have, want) for have, want in zip(column.shape, size, strict=True)], fill, column.dtype)
    larger[tuple(slice(0, have) for have in column.shape)] = column
    return larger
