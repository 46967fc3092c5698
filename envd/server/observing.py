"""One interceptor for all that watches calls: metrics and spans. A server that has neither has no interceptor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class Observer(Protocol):
    """Sees each call begin and end."""

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """A call of `Service/Method` begins; request: its message, or None for a stream of them. What is returned is called with the
        name of its status code when it ends. Neither may raise or wait."""
        ...


class Observing(grpc.aio.ServerInterceptor):
    """Tells observers of every call to a method that exists."""

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
        wrapped = self._many(method, handler) if streams[1] else self._one(method, handler)
        return _KINDS[streams](wrapped, handler.request_deserializer, handler.response_serializer)

    def _one(self, method: str, handler: Any) -> Callable[..., Awaitable[Any]]:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def call(request: Any, context: Any) -> Any:
            with self._watched(method, None if handler.request_streaming else request, context):
                return await inner(request, context)

        return call

    def _many(self, method: str, handler: Any) -> Callable[..., AsyncIterator[Any]]:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._watched(method, None if handler.request_streaming else request, context):
                async for message in inner(request, context):
                    yield message

        return call

    @contextmanager
    def _watched(self, method: str, request: Any, context: Any) -> Iterator[None]:
        ends = [observer.begin(method, request, context) for observer in self._observers]
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


def _code_of(context: Any) -> str:
    """The status that a call was aborted with; one that raised anything else ends as UNKNOWN."""
    code = context.code()
    code = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _CODES.get(code or grpc.StatusCode.UNKNOWN.value[0], "UNKNOWN")
