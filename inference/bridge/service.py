"""The gRPC service: takes calls apart and puts answers together. `sessions` does the rest."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import numpy as np

from contracts import tracing
from contracts.errors import TriplaneError
from contracts.pb import bridge_pb2 as pb
from contracts.pb import bridge_pb2_grpc as rpc
from inference.bridge import checks, record
from inference.bridge.calls import Context, abort, check_read, owner_of
from inference.bridge.connect import Connection
from inference.bridge.errors import BadMessage, TooManySteps
from inference.bridge.sessions import Sessions
from inference.errors import RequestTooLong, StaleVersion

T = TypeVar("T")
_VERSION_TRIES = 3


def unary(
    method: Callable[[Any, Any, Context], Awaitable[T]],
) -> Callable[[Any, Any, Context], Awaitable[T]]:
    """Wrap a unary method: turn errors into statuses."""

    @functools.wraps(method)
    async def answer(service: Any, request: Any, context: Context) -> T:
        try:
            check_read(request)
            return await method(service, request, context)
        except TriplaneError as error:
            service.note_refused(error)
            await abort(context, error)

    return answer


def streaming(
    method: Callable[[Any, Any, Context], AsyncIterator[T]],
) -> Callable[[Any, Any, Context], AsyncIterator[T]]:
    """Wrap a streaming method: turn errors into statuses."""

    @functools.wraps(method)
    async def answer(service: Any, request: Any, context: Context) -> AsyncIterator[T]:
        try:
            check_read(request)
            async for each in method(service, request, context):
                yield each
        except TriplaneError as error:
            service.note_refused(error)
            await abort(context, error)

    return answer


class BridgeService(rpc.BridgeServicer):
    """See contracts/protos/bridge.proto."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._stepping: Counter[str] = Counter()
        """Open Step calls by owner."""

    def note_refused(self, error: TriplaneError) -> None:
        """Count a call that ends with an error."""
        self._sessions.counts.refused[type(error).__name__] += 1

    @unary
    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoReply:  # noqa: D102 (the protocol says it)
        sessions = self._sessions
        return pb.InfoReply(
            versions=[await sessions.engine.version()],
            vocabulary=sessions.limits.vocabulary,
            context_tokens=sessions.limits.context_tokens,
            credits=sessions.bounds.credits,
            lease_s=sessions.bounds.lease_s,
            max_episodes=sessions.bounds.max_episodes,
            hosted_tasks=0 if sessions.hosting is None else len(sessions.hosting.tasks),
        )

    @unary
    async def StartEpisode(self, request: pb.StartEpisodeRequest, context: Context) -> pb.EpisodeState:  # noqa: D102
        return await self._sessions.start(owner_of(context), request)

    @streaming
    async def Step(self, request: pb.StepRequest, context: Context) -> AsyncIterator[pb.StepEvent]:  # noqa: D102
        ready, owner = asyncio.Event(), owner_of(context)
        if self._stepping[owner] >= self._sessions.bounds.credits:
            raise TooManySteps(f"{self._stepping[owner]} Step calls of this key are open: wait for one, or use Connect")
        with tracing.joined(tracing.parent_of(context.invocation_metadata() or ())):
            reader = self._sessions.step(owner, request, lambda _: ready.set())
        self._stepping[owner] += 1
        try:
            while not reader.done:
                event = pb.StepEvent()
                if reader.take(event):
                    yield event
                    continue
                await ready.wait()
                ready.clear()
        finally:
            self._sessions.leave(reader)
            self._stepping[owner] -= 1

    @streaming
    async def EndEpisode(  # noqa: D102
        self, request: pb.EndEpisodeRequest, context: Context
    ) -> AsyncIterator[pb.EpisodeChunk]:
        for chunk in record.chunks(self._sessions.end(owner_of(context), request)):
            yield chunk

    @streaming
    async def Connect(self, request: AsyncIterator[pb.Command], context: Context) -> AsyncIterator[pb.Event]:  # noqa: D102
        with tracing.joined(tracing.parent_of(context.invocation_metadata() or ())):
            connection = Connection(self._sessions, owner_of(context), request)
        try:
            async for event in connection.events():
                yield event
        finally:
            connection.close()

    @unary
    async def CancelStep(self, request: pb.StepName, context: Context) -> pb.EpisodeState:  # noqa: D102
        return self._sessions.cancel(owner_of(context), request.episode_id, request.step)

    @unary
    async def GetEpisode(self, request: pb.EpisodeName, context: Context) -> pb.EpisodeState:  # noqa: D102
        return self._sessions.state(owner_of(context), request.episode_id)

    @unary
    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewReply:  # noqa: D102
        return pb.RenewReply(lost=self._sessions.renew(owner_of(context), request.episode_ids))

    @unary
    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreReply:  # noqa: D102
        sessions = self._sessions
        temperature = request.temperature if request.HasField("temperature") else 1.0
        checks.check_temperature(temperature, "temperature")
        tokens = sessions.limits.check_ids(request.ids, "ids")
        if not tokens:
            raise BadMessage("ids is empty: send at least one token")
        if 0 < sessions.limits.context_tokens < tokens:
            raise RequestTooLong(
                f"ids has {tokens} tokens, the policy's context holds {sessions.limits.context_tokens}: shorten it"
            )
        ids = np.frombuffer(request.ids, "<i4").tolist()
        for _ in range(_VERSION_TRIES):
            before = await sessions.engine.version()
            if request.version and request.version != before:
                raise StaleVersion(f"version {request.version[:80]} is asked for, but {before} is served")
            logprobs = await sessions.engine.score(ids, temperature)
            if await sessions.engine.version() == before:
                return pb.ScoreReply(logprobs=np.array(logprobs, "<f4").tobytes(), version=before)
        raise StaleVersion("the policy served changed while scoring, again and again: ask again")
