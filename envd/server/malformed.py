"""Record what servicers do not see: malformed or oversized requests, unknown methods, and clients that abandon calls or
stop reading.

Watched(server, sandboxes) -> add_XServicer_to_server(service, watched): each method's handler is wrapped
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from contracts.rpc import caller
from contracts.rpc.connecting import MESSAGE_BYTES
from envd.connection import SANDBOX_TOKEN
from envd.server.audit import AuditLog
from envd.server.calls import metadata_of
from envd.server.sandboxes import Sandboxes

ACCEPTED_BYTES = MESSAGE_BYTES + (16 << 20)
"""Largest request, in bytes, that gRPC accepts. A request above MESSAGE_BYTES and up to this size is refused here, with
an event; gRPC drops a larger one without telling the server.
"""
STALLED_S = 10.0
"""Seconds without a read after which the client of a stream is recorded as stalled."""


class _Unfit(Exception):
    """Bytes that are no valid request of a method."""

    def __init__(self, code: grpc.StatusCode, reason: str, size: int) -> None:
        super().__init__(reason)
        self.code, self.reason, self.size = code, reason, size


class Watched:
    """Wrapper of a server that services are added to.

    It stores the caller in each call's task, and records the events of a call outside its servicer.

    Each call costs one more frame while its request is parsed, one around its method, and a microsecond.
    """

    def __init__(self, server: grpc.aio.Server, sandboxes: Sandboxes) -> None:
        self._server, self._sandboxes, self._audit = server, sandboxes, sandboxes.audit
        self.stopping = False
        """Whether the server is stopping: calls that end now are not recorded as abandoned."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """See grpc.aio.Server. Not wrapped: generated code registers the same methods below as well."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See grpc.aio.Server."""
        short = service.rpartition(".")[2]
        watched = {name: self._watched(f"{short}/{name}", handler) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, watched)

    def _watched(self, method: str, handler: Any) -> Any:
        parse = _parsing(handler.request_deserializer, in_stream=bool(handler.request_streaming))
        wrapped: dict[str, Any]
        if handler.unary_unary is not None:
            wrapped = {"unary_unary": self._one(method, handler.unary_unary)}
        elif handler.stream_unary is not None:
            wrapped = {"stream_unary": self._one(method, handler.stream_unary)}
        else:
            wrapped = {"unary_stream": self._many(method, handler.unary_stream)}
        return handler._replace(request_deserializer=parse, **wrapped)

    def _one(self, method: str, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            caller.answering(context, method)
            began = time.monotonic()
            try:
                if type(request) is _Unfit:
                    raise request
                return await inner(request, context)
            except _Unfit as unfit:
                await self._refuse(method, context, unfit)
            except asyncio.CancelledError:
                self._left(method, request, context, began)
                raise

        return call

    def _many(self, method: str, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            caller.answering(context, method)
            if type(request) is _Unfit:
                await self._refuse(method, context, request)
            writing = _Writing(lambda: self._stalled(method, request, context))
            try:
                async with aclosing(inner(request, context)) as messages:
                    async for message in messages:
                        writing.begins()
                        # returns once gRPC has accepted the message; blocks while the client does not read
                        yield message
                        writing.ended()
            finally:
                writing.close()

        return call

    async def _refuse(self, method: str, context: Any, unfit: _Unfit) -> NoReturn:
        self._audit.record("request.refused", "", method=method, reason=unfit.reason, bytes=unfit.size)
        await context.abort(unfit.code, unfit.reason)
        raise unfit

    def _left(self, method: str, request: Any, context: Any, began: float) -> None:
        if not self.stopping:
            seconds = round(time.monotonic() - began, 3)
            self._audit.record("call.abandoned", self._own(request, context), method=method, seconds=seconds)

    def _stalled(self, method: str, request: Any, context: Any) -> None:
        self._audit.record("client.stalled", self._own(request, context), method=method, seconds=STALLED_S)

    def _own(self, request: Any, context: Any) -> str:
        """Id of the sandbox that a request names, if its token is right; else empty: unknown ids share a bucket."""
        identity = str(getattr(request, "sandbox_id", ""))
        return identity if self._sandboxes.knows(identity, metadata_of(context, SANDBOX_TOKEN)) else ""


class Unknown(grpc.GenericRpcHandler):
    """Handler that records calls of unknown methods. Added last, so that gRPC asks it only if no other handler fits."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def service(self, handler_call_details: Any) -> None:
        """See grpc.GenericRpcHandler."""
        self._audit.record("request.refused", "", method=str(handler_call_details.method), reason="no such method")


class _Writing:
    """Watchdog that calls back, once, when a write has waited for STALLED_S.

    A stream whose reader keeps up costs one clock read per message.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def begins(self) -> None:
        """Note that a message is passed to gRPC."""
        self._since = self._loop.time()
        if self._timer is None and not self._told:
            self._timer = self._loop.call_later(STALLED_S, self._look)

    def ended(self) -> None:
        """Note that gRPC has accepted the message."""
        self._since = 0.0

    def close(self) -> None:
        """Cancel the timer at the end of the stream."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._since:
            return
        left = self._since + STALLED_S - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._told = True
            self._tell()


def _parsing(parse: Callable[[bytes], Any], *, in_stream: bool) -> Callable[[bytes], Any]:
    """Deserializer that passes an _Unfit for invalid bytes to the method's wrapper: returned as the request, or raised
    from a stream.

    An error raised for a single request would be answered by gRPC itself, without an event.
    """

    def parsed(data: bytes) -> Any:
        if len(data) > MESSAGE_BYTES:
            words = f"SERVER: Received message larger than max ({len(data)} vs. {MESSAGE_BYTES})"
            unfit = _Unfit(grpc.StatusCode.RESOURCE_EXHAUSTED, words, len(data))
        else:
            try:
                return parse(data)
            except DecodeError:
                unfit = _Unfit(grpc.StatusCode.INVALID_ARGUMENT, "no message of this method", len(data))
        if in_stream:
            raise unfit
        return unfit

    return parsed
