"""A turn that is sampled, and its readers.

    engine.stream --pieces--> journal --> episode --wake--> subscriptions: each takes what is new to it, when it can

A reader has a place in the turn and no queue: one that is slow takes larger chunks later. The turn does not depend on
its readers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from contracts import tracing
from contracts.errors import TriplaneError
from contracts.pb import bridge_pb2 as pb
from contracts.retries import backoff_s
from contracts.supports import encode_supports
from inference.bridge.checks import Limits
from inference.bridge.episode import TOKEN_BYTES, Episode, Turn
from inference.bridge.errors import BridgeError, EpisodeExpired
from inference.engines.base import Engine, Piece, SamplingParams, check_sampled
from inference.engines.spans import completed, request_span
from inference.errors import EngineError, EngineStopped, RequestTooLong, StaleVersion

Part = tuple[str, bytes, bytes, bytes]
"""Version, ids and logprobs of consecutive tokens, and where the episode is restricted `Episode.drawn` of them."""
HOSTED_LOSSES = 4
"""Times that a hosted turn is resumed after its engine was lost. A client can't resume it by another step, since the
environment replies to whole turns only.
"""
FIRST_PAUSE_S = 0.5
"""Mean pause after the first loss, in seconds; `backoff_s` gives later pauses."""
_STEP = tracing.grpc_call("triplane.bridge.v1.Bridge", "Step")
_log = logging.getLogger(__name__)


class Subscription:
    """One reader of a turn."""

    __slots__ = ("_called", "_episode", "_step", "_turn", "_wake", "cursor", "done", "error")

    def __init__(
        self, episode: Episode, turn: Turn, step: int, cursor: int, wake: Callable[[Subscription], None]
    ) -> None:
        """cursor: policy tokens of the turn that the reader has. wake: called when there is something to take, once
        until it is taken.
        """
        self._episode, self._turn, self._step, self._wake = episode, turn, step, wake
        self.cursor = cursor
        self.done = False
        """Whether nothing is left to take."""
        self.error: BridgeError | None = None
        self._called = False

    @property
    def handle(self) -> int:
        """Number of the episode."""
        return self._episode.handle

    def notify(self) -> None:
        """Wake the reader if there is something to take."""
        ready = self._turn.tokens > self.cursor or self._episode.is_over(self._turn) or self.error is not None
        if ready and not self._called and not self.done:
            self._called = True
            self._wake(self)

    def take(self, event: pb.StepEvent) -> bool:
        """Fill `event` with tokens that are new to this reader, and the end of the turn after the last of them. False:
        the reader has to wait for `wake`.

        Raises EpisodeExpired if the tokens are gone, and the error that stopped the turn without ending it.
        """
        turn = self._turn
        if self._episode.expired:
            self.done = True
            raise EpisodeExpired(
                f"the lease of episode {self._episode.identity} ended before all of step {self._step} was read: renew"
                " leases in time"
            )
        new = turn.tokens > self.cursor
        if new:
            self.cursor = self._episode.fill_tokens(event.tokens, turn, self.cursor)
        if self._episode.is_over(turn) and self.cursor >= turn.tokens:
            if turn.reply is not None:
                event.end.CopyFrom(turn.reply)
            else:
                event.end.finish, event.end.tokens = turn.finish, turn.tokens  # type: ignore[assignment]
            self.done = True
        elif not new and self.error is not None:
            self.done = True
            raise self.error
        elif not new:
            self._called = False
            return False
        event.episode_id, event.step = self._episode.identity, self._step
        return True


class Running:
    """A turn that is being sampled, in a task of its own."""

    def __init__(
        self,
        engine: Engine,
        episode: Episode,
        limits: Limits,
        turn_s: float,
        *,
        add: Callable[[Running, list[Part]], None],
        end: Callable[[Running, int], None],
        act: Callable[[], Awaitable[None]] | None,
        over: Callable[[Running], None],
        fail: Callable[[Running, BridgeError], None],
    ) -> None:
        """limits: of its tokens and context. turn_s: seconds after which the turn ends, 0 for none.

        add: keeps tokens. end: ends sampling as a pb.Finish. act: makes the environment
        reply to the turn, where the bridge hosts it. over: called when the turn is complete. fail: stops it
        without an end.
        """
        self.episode, self.turn = episode, episode.turns[-1]
        self.readers: set[Subscription] = set()
        self.begun, self.answered = time.monotonic(), False
        """When it was begun here, on the monotonic clock; whether it has a token since."""
        self._engine, self._limits = engine, limits
        self._add, self._end, self._act, self._over, self._fail = add, end, act, over, fail
        self._losses = 0 if act is None else HOSTED_LOSSES
        """Times that the turn is resumed after its engine was lost."""
        self.task = asyncio.create_task(self._run(turn_s))

    def stop(self) -> None:
        """Stop sampling. The caller decides what the turn ends as."""
        self.task.cancel()

    @property
    def _is_stopped(self) -> bool:
        """Whether `stop` or a time limit cancels this turn: libraries raise CancelledError for reasons of their own."""
        return self.task.cancelling() > 0

    def fail(self, error: BridgeError) -> None:
        """Let all readers raise an error after the tokens that there are."""
        for reader in self.readers:
            reader.error = error
        self.wake_readers()

    def wake_readers(self) -> None:
        """Wake all readers."""
        for reader in self.readers:
            reader.notify()

    def _params(self) -> SamplingParams:
        """Parameters for the rest of the turn: the random number of a token depends on (seed, position) alone."""
        sampling = self.turn.sampling or self.episode.sampling
        context = self._limits.context_tokens
        room = context - self.episode.tokens if context else 1 << 31
        wanted = sampling.max_tokens - self.turn.tokens if sampling.max_tokens else room
        params = SamplingParams(sampling.temperature, min(wanted, room), sampling.seed, sampling.stop_token_ids)
        drawn = self.episode.restricted
        if drawn is None:
            return params
        return replace(params, top_p=drawn.top_p, grammar=drawn.grammar, begun=self.turn.tokens)

    async def _run(self, turn_s: float) -> None:
        """Sample the rest of the turn, and let the environment reply."""
        try:
            with tracing.span(*_STEP, "server") as span:
                span.set({"triplane.episode": self.episode.identity, "triplane.turn": len(self.episode.turns) - 1})
                if self.turn.finish is None:
                    await self._sampled(turn_s)
                if self.turn.finish is None:  # the bridge ends, and the next one goes on
                    return
                if self._act is not None:
                    await self._act()
            self._over(self)
        except BridgeError as error:  # the turn can go on later
            self._fail(self, error)
        except asyncio.CancelledError as error:
            if self._is_stopped:
                raise
            self._environment_failed(error)
        except Exception as error:  # noqa: BLE001 (told to the client, and logged)
            self._environment_failed(error)

    def _environment_failed(self, error: BaseException) -> None:
        _log.error("episode %s: its environment failed", self.episode.identity, exc_info=error)
        self._fail(self, BridgeError(f"the environment of episode {self.episode.identity} failed: {error!r}"))

    async def _sampled(self, turn_s: float) -> None:
        """Sample to the end. Raises BridgeError of the journal: the tokens were not kept."""
        try:
            async with asyncio.timeout(turn_s or None):
                finish = await self._attempt()
                losses = 0
                while finish == pb.ENGINE_LOST and losses < self._losses:
                    losses += 1
                    await asyncio.sleep(backoff_s(losses, FIRST_PAUSE_S))
                    finish = await self._attempt()
        except TimeoutError:
            finish = pb.DEADLINE
        self._end(self, finish)

    async def _attempt(self) -> int:
        """Sample until the turn ends or the engine is lost, and return its pb.Finish. Raises BridgeError."""
        try:
            return await self._sample()
        except BridgeError:
            raise
        except StaleVersion:
            return pb.STALE
        except RequestTooLong:
            return pb.CONTEXT
        except asyncio.CancelledError as error:
            if self._is_stopped:
                raise
            return self._engine_lost(error)
        except Exception as error:  # noqa: BLE001 (told to the client as ENGINE_LOST, and logged)
            return self._engine_lost(error)

    async def _sample(self) -> int:
        """Sample to the end of the turn and return its pb.Finish."""
        pinned = self.episode.version if self.episode.rule == pb.PINNED else None
        params = self._params()
        # a resumed turn may have all its tokens; as at the engines, a stop token ends it before its length does
        if self.turn.tokens and self._last_token() in params.stop_token_ids:
            return pb.STOP
        if params.max_tokens < 1:
            return self._length()
        prompt = np.frombuffer(bytes(self.episode.ids), "<i4")
        before = self.turn.tokens
        with request_span(len(prompt), params) as span:
            async with aclosing(self._engine.stream(prompt, params)) as pieces:  # type: ignore[arg-type]
                async for piece in pieces:
                    left = params.max_tokens - (self.turn.tokens - before)
                    check_sampled(piece, left, self._limits.vocabulary)
                    parts, stale = parts_of(piece, pinned, restricted=self.episode.restricted is not None)
                    if parts:
                        self._add(self, parts)
                    if stale:
                        return pb.STALE
                    if piece.finish_reason is not None:
                        span.set(completed(self.turn.tokens - before, piece.finish_reason, piece.spans))
                        return self._finish_of(piece.finish_reason, params.stop_token_ids)
        return self._engine_lost(EOFError("its stream ended without a finish reason"))

    def _finish_of(self, reason: str, stops: Collection[int]) -> int:
        if reason == "stop":
            if self.turn.tokens and self._last_token() in stops:
                return pb.STOP
            return self._engine_lost(EngineError("it ended a turn with the reason stop, and without a stop token"))
        if reason == "length":
            return self._length()
        return self._engine_lost(EngineStopped(f"it ended the completion with {reason!r}"))

    def _length(self) -> int:
        sampling = self.turn.sampling or self.episode.sampling
        return pb.LENGTH if 0 < sampling.max_tokens <= self.turn.tokens else pb.CONTEXT

    def _last_token(self) -> int:
        return int.from_bytes(memoryview(self.episode.ids)[-TOKEN_BYTES:], "little", signed=True)

    def _engine_lost(self, error: BaseException) -> int:
        known = isinstance(error, TriplaneError)
        _log.error(
            "episode %s: the engine is lost: %s", self.episode.identity, error, exc_info=None if known else error
        )
        return pb.ENGINE_LOST


def parts_of(piece: Piece, pinned: str | None, *, restricted: bool) -> tuple[list[Part], bool]:
    """Each span of a piece, up to the first that is not of `pinned`, and whether there was one. pinned: a version; None
    takes all. restricted: with supports; raises EngineError if the piece has none.
    """
    parts: list[Part] = []
    if restricted and piece.supports is None and len(piece.token_ids):
        raise EngineError(
            "the engine does not tell what tokens were drawn from: restrict episodes of other engines only"
        )
    for version, start, end in piece.spans:
        if pinned is not None and version != pinned:
            return parts, True
        ids = piece.token_ids[start:end].astype("<i4", copy=False).tobytes()
        drawn = b""
        if restricted and piece.supports is not None:
            forced = bytes(piece.forced[start:end]) if piece.forced else bytes(end - start)
            told = piece.log_mass[start:end] if piece.log_mass else [math.nan] * (end - start)
            log_mass = np.array(told, "<f4").tobytes()
            drawn = forced + log_mass + encode_supports(piece.supports.between(start, end))
        parts.append((version, ids, piece.logprobs[start:end].astype("<f4", copy=False).tobytes(), drawn))
    return parts, False
