"""What no servicer sees: requests that are no message of their method, or are too large; methods that do not exist;
clients that leave.

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

from envd.connection import MESSAGE_BYTES, SANDBOX_TOKEN
from envd.server import caller
from envd.server.audit import AuditLog
from envd.server.calls import metadata_of
from envd.server.sandboxes import Sandboxes

ACCEPTED_BYTES = MESSAGE_BYTES + (16 << 20)
"""What gRPC takes in: a request above the limit and up to this is refused here, with an event; what is larger gRPC
drops, and tells nobody.
"""
STALLED_S = 10.0
"""A stream whose client takes nothing for so long is told."""


class _Unfit(Exception):
    """Bytes that are no request."""

    def __init__(self, code: grpc.StatusCode, reason: str, size: int) -> None:
        super().__init__(reason)
        self.code, self.reason, self.size = code, reason, size


class Watched:
    """Stands for a server where services are added to it.

    Each call's task is told who calls; what happens to a call outside its servicer becomes an event.

    Costs a call one more frame while its request is parsed, one around its method, and a microsecond.
    """

    def __init__(self, server: grpc.aio.Server, sandboxes: Sandboxes) -> None:
        self._server, self._sandboxes, self._audit = server, sandboxes, sandboxes.audit
        self.stopping = False
        """The server stops, which ends calls that nobody has abandoned."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """See grpc.aio.Server; generated code gives these the same methods as registered ones."""
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
                        # comes back when gRPC has taken the message: it waits while the client reads nothing
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
        """The sandbox that a request names, where it may: names that a client makes up would each have a burst of
        events of their own.
        """
        identity = str(getattr(request, "sandbox_id", ""))
        return identity if self._sandboxes.knows(identity, metadata_of(context, SANDBOX_TOKEN)) else ""


class Unknown(grpc.GenericRpcHandler):
    """Records what is asked for and not there. Added last: it is asked only where nothing else answers."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def service(self, handler_call_details: Any) -> None:
        """See grpc.GenericRpcHandler."""
        self._audit.record("request.refused", "", method=str(handler_call_details.method), reason="no such method")


class _Writing:
    """Calls back, once, when a write has waited for STALLED_S.

    A stream whose reader keeps up pays a look at the clock a message.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._told = False

    def begins(self) -> None:
        """A message is given to gRPC."""
        self._since = self._loop.time()
        if self._timer is None and not self._told:
            self._timer = self._loop.call_later(STALLED_S, self._look)

    def ended(self) -> None:
        """It has taken it."""
        self._since = 0.0

    def close(self) -> None:
        """The stream has ended."""
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
    """A deserializer that gives bytes which are no request to the method's wrapper: as the request, or from the stream
    as an error.

    What it raised for a single request gRPC would answer by itself.
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
