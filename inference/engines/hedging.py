"""Streams of engines over several replicas: after a fault another replica continues, and a request whose first token
is late is hedged.

    request --> replica --no token within the hedging delay--> the same request to a second replica
            --> the one with the first token goes on, the other one is canceled
    a replica fails --> another one continues after the tokens that there are

Nobody has seen a token when the winner is chosen, so that no length of answers is preferred: that takes replicas that
send tokens while they are sampled. Source: Dean, Barroso, The Tail at Scale, 2013.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from contracts.errors import TriplaneError
from inference.engines.base import FinishReason, Piece, SamplingParams, check_streamable, empty_piece
from inference.engines.tries import REPLICA_FAULTS, TRIES, choose_other
from inference.errors import EngineError
from inference.router import Decision, Router

_log = logging.getLogger(__name__)
R = TypeVar("R")
LATE = 2.0
"""Multiple of the expected seconds after which a first token is late."""
SHARE, FIRST = 0.1, 8
"""Bound on hedges: SHARE of all requests, plus FIRST. Without it a busy fleet would get twice the load."""


class Hedging:
    """Rule of an engine for hedging requests, with counts."""

    def __init__(self, delay_s: float) -> None:
        """delay_s: least seconds without a token before a request is hedged."""
        self._delay_s = delay_s
        self.requests = self.sent = self.won = 0
        """Requests, those that were hedged, and those of them that the second replica answered."""

    @property
    def allowed(self) -> bool:
        """Whether there were not too many hedges."""
        return self.sent < FIRST + SHARE * self.requests

    def delay_s(self, expected_s: float) -> float:
        """Seconds without a token after which to hedge a request whose first one is expected after `expected_s`."""
        return max(self._delay_s, LATE * expected_s)

    def report(self) -> None:
        """Log how often it was of use."""
        if self.sent:
            _log.info("hedged %d of %d turns; %d began at the second replica", self.sent, self.requests, self.won)


@dataclass
class _Request:
    """A request, and the tokens sampled for it so far."""

    prompt: Sequence[int]
    params: SamplingParams
    hedging: Hedging | None
    """None: it is not hedged."""
    sampled: list[int] = field(default_factory=list)
    tries: int = TRIES
    """Replicas that it may still be sent to."""

    @property
    def ended(self) -> FinishReason | None:
        """Why nothing is left to sample, or None."""
        if self.sampled and self.sampled[-1] in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.sampled) >= self.params.max_tokens else None

    def rest(self) -> tuple[Sequence[int], SamplingParams]:
        """Prompt and parameters that continue it."""
        if not self.sampled:
            return self.prompt, self.params
        count, params = len(self.sampled), self.params
        begun = params.begun + count if params.grammar is not None else params.begun
        left = replace(params, max_tokens=params.max_tokens - count, begun=begun)
        return [*(int(token) for token in self.prompt), *self.sampled], left


Choose = Callable[[Sequence[int], SamplingParams], Awaitable[tuple[R, Decision]]]
"""A replica for a request, and the decision that the router has begun."""
Send = Callable[[R, Sequence[int], SamplingParams], AsyncGenerator[Piece]]
"""Opens a stream at a replica."""


class _Lost(Exception):
    """A replica failed after its first piece."""


class _Attempt(Generic[R]):
    """A request at one replica."""

    def __init__(self, replica: R, decision: Decision, pieces: AsyncGenerator[Piece]) -> None:
        self.replica, self.decision, self.pieces = replica, decision, pieces
        self.began = time.monotonic()
        self.first = asyncio.ensure_future(_first(pieces))

    async def close(self) -> None:
        """Cancel the request. Idempotent."""
        self.first.cancel()
        await asyncio.gather(self.first, return_exceptions=True)
        await self.pieces.aclose()


async def _first(pieces: AsyncGenerator[Piece]) -> Piece:
    async for piece in pieces:
        return piece
    raise EngineError("the engine's stream ended without a piece")


class Streams(Generic[R]):
    """Streams of one engine at its replicas."""

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, R],
        choose: Choose[R],
        send: Send[R],
        leave_out: Callable[[R, TriplaneError], None],
        hedging: Hedging | None,
    ) -> None:
        """replicas: by their names in the router. leave_out: called with a replica and its error when it fails."""
        self._router, self._replicas, self._hedging = router, replicas, hedging
        self._choose, self._send, self._leave_out = choose, send, leave_out

    async def of(self, prompt: Sequence[int], params: SamplingParams, *, hedged: bool) -> AsyncGenerator[Piece]:
        """Stream the pieces of a request; at most TRIES replicas are asked. hedged: whether to hedge it.

        Raises what `choose` and `leave_out` raise, the fault of the last replica, and other errors of replicas at once.
        """
        check_streamable(params)
        request = _Request(prompt, params, self._hedging if hedged else None)
        if request.hedging is not None:
            request.hedging.requests += 1
        while True:
            try:
                async with aclosing(self._pieces(request)) as pieces:
                    async for piece in pieces:
                        request.sampled += piece.token_ids.tolist()
                        yield piece
                return
            except _Lost as error:
                fault = error.__cause__
                if request.ended is not None:
                    yield empty_piece(request.ended)
                    return
                if not request.tries and fault is not None:
                    raise fault from None

    async def _pieces(self, request: _Request) -> AsyncGenerator[Piece]:
        """Pieces of one replica. Raises _Lost if it fails after the first."""
        attempts: list[_Attempt[R]] = []
        try:
            winner = await self._race(request, attempts)
            piece, sampled = winner.first.result(), 0
            try:
                while True:
                    sampled += len(piece.token_ids)
                    if piece.finish_reason is not None:  # whoever reads it may close the stream
                        seconds = time.monotonic() - winner.began
                        self._router.finish(winner.decision, seconds=seconds, sampled=sampled)
                    yield piece
                    piece = await anext(winner.pieces)
            except StopAsyncIteration:
                return
            except REPLICA_FAULTS as error:
                self._leave_out(winner.replica, error)
                raise _Lost from error
        finally:
            for each in attempts:
                self._router.finish(each.decision)
                await each.close()

    async def _race(self, request: _Request, attempts: list[_Attempt[R]]) -> _Attempt[R]:
        """The attempt with the first piece. Adds those that run to `attempts`, at most two at once."""
        hedging = request.hedging
        await self._start(request, attempts)
        while True:
            delay = None
            if hedging is not None and request.tries and len(attempts) == 1:
                delay = hedging.delay_s(self._router.expected_s(attempts[0].decision))
            await asyncio.wait(
                [each.first for each in attempts],
                timeout=None if delay is None else max(0.0, attempts[0].began + delay - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            over = [each for each in attempts if each.first.done()]
            winner = next((each for each in over if each.first.exception() is None), None)
            if winner is not None:
                break
            for each in over:
                await self._failed(each, attempts, request)
            if not attempts:
                await self._start(request, attempts)
            elif not over and hedging is not None:
                if hedging.allowed:
                    hedging.sent += await self._start(request, attempts)
                hedging = None  # once
        if len(attempts) > 1 and request.hedging is not None:
            request.hedging.won += winner is attempts[1]
        for other in [each for each in attempts if each is not winner]:
            attempts.remove(other)
            self._router.outpaced(other.decision, time.monotonic() - other.began)
            await other.close()
        return winner

    async def _start(self, request: _Request, attempts: list[_Attempt[R]]) -> bool:
        """Send a request to a replica beside those of `attempts`. Returns whether there is one."""
        prompt, params = request.rest()
        if attempts:
            decision = choose_other(self._router, prompt, params, [each.decision.replica for each in attempts])
            if decision is None:
                return False
            replica = self._replicas[decision.replica]
        else:
            replica, decision = await self._choose(prompt, params)
        request.tries -= 1
        attempts.append(_Attempt(replica, decision, self._send(replica, prompt, params)))
        return True

    async def _failed(self, attempt: _Attempt[R], attempts: list[_Attempt[R]], request: _Request) -> None:
        """Leave the replica of an attempt out. Raises its fault if it is no replica's, or no try is left."""
        attempts.remove(attempt)
        self._router.finish(attempt.decision)
        await attempt.close()
        error = attempt.first.exception()
        assert error is not None, "it has failed"
        if not isinstance(error, REPLICA_FAULTS):
            raise error
        self._leave_out(attempt.replica, error)
        if not attempts and not request.tries:
            raise error
