"""One interceptor for all observers of calls: metrics, spans, the trail of calls. A server without observers does not
install it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from contracts.rpc.keys import HANDLERS

_BEHAVIOURS = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class Observer(Protocol):
    """Observer of the start and the end of each call."""

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """Note the start of a call of `Service/Method`, and return a function that is called with its status code's
        name at its end. Neither may raise or block.

        request: its message, a `Stream` of messages, or None for bytes that are not a valid message, and for a call
        that is refused before its request is read.
        """
        ...


class Stream:
    """Iterator over the messages of a call with a request stream, which keeps the first one."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self.first: Any = None
        """First message; None until it has arrived."""
        self._messages = messages

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        message = await anext(self._messages)
        if self.first is None:
            self.first = message
        return message


class Observing(grpc.aio.ServerInterceptor):
    """Interceptor that notifies observers of every call to an existing method."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None:
            return None
        streams = bool(handler.request_streaming), bool(handler.response_streaming)
        method = str(details.method).rpartition(".")[2]
        inner = getattr(handler, _BEHAVIOURS[streams])
        writes = streams[1] and not inspect.iscoroutinefunction(inner)  # a coroutine writes its responses itself
        reads = handler.request_deserializer is not None
        wrapped = self._many(method, inner, reads) if writes else self._one(method, inner, reads)
        return HANDLERS[streams](wrapped, handler.request_deserializer, handler.response_serializer)

    def _one(
        self, method: str, inner: Callable[[Any, Any], Awaitable[Any]], reads: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            request = _seen(request) if reads else None
            with self._watched(method, request, context):
                return await inner(request, context)

        return call

    def _many(self, method: str, inner: Callable[[Any, Any], Any], reads: bool) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            request = _seen(request) if reads else None
            with self._watched(method, request, context):
                async with aclosing(inner(request, context)) as messages:
                    async for message in messages:
                        yield message

        return call

    @contextmanager
    def _watched(self, method: str, request: Any, context: Any) -> Iterator[None]:
        told = request if isinstance(request, Message | Stream) else None
        ends = [observer.begin(method, told, context) for observer in self._observers]
        code = "OK"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            code = "CANCELLED"
            raise
        except BaseException:
            code = _code_of(context)
            raise
        finally:
            for end in ends:
                end(code)


def _seen(request: Any) -> Any:
    return Stream(request) if hasattr(request, "__anext__") else request


def _code_of(context: Any) -> str:
    """Name of the status that a call was aborted with; UNKNOWN for any other exception."""
    code = context.code()
    code = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _CODES.get(code or grpc.StatusCode.UNKNOWN.value[0], "UNKNOWN")
