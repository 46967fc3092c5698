"""Interceptor of a server that asks for a bearer key."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from contracts.rpc import caller
from contracts.rpc.connecting import ERROR_NAME

HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Constructors of handlers, by whether requests and responses are streams."""
_HEALTH = "/grpc.health.v1.Health/"
"""Methods that need no key, since a kubelet's probe can't send one."""
HEALTH_S = 5.0
"""Timeout for receiving such a request, in seconds: it may be as large as any other."""
Refused = Callable[[str], object]


class KeyCheck(grpc.aio.ServerInterceptor):
    """Interceptor that answers UNAUTHENTICATED, error `AccessDenied`, to calls without one of the keys."""

    def __init__(self, keys: tuple[bytes, ...], advice: str, refused: Refused | None = None) -> None:
        """advice: how a client sends a key, for the error. refused: is told the method of each refused call, whose
        caller is set.
        """
        self._keys, self._advice, self._refused = keys, advice, refused

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None or self._is_known(details):
            return handler
        if details.method.startswith(_HEALTH):
            return _hurried(handler)
        return self._refusing(handler, str(details.method))

    def _is_known(self, details: grpc.HandlerCallDetails) -> bool:
        said = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        given = (said if isinstance(said, bytes) else said.encode()).removeprefix(b"Bearer ")
        # compares all keys in constant time, so that timing does not reveal a near match
        found = [key for key in self._keys if secrets.compare_digest(given, key)]
        if found:
            caller.known_by(found[0])
        return bool(found)

    def _refusing(self, handler: Any, method: str) -> Any:
        """Handler that refuses each call without receiving its request, which may be large."""

        async def one(request: Any, context: Any) -> Any:
            caller.answering(context, method)
            if self._refused is not None:
                self._refused(method)
            words = f"this server asks for a key: {self._advice}"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, words, ((ERROR_NAME, "AccessDenied"),))

        async def many(request: Any, context: Any) -> Any:
            await one(request, context)
            yield  # makes this an async generator

        # declared as a stream: gRPC calls the handler of a single request only after it has received the request
        make = HANDLERS[True, bool(handler.response_streaming)]
        return make(many if handler.response_streaming else one)


def _hurried(handler: Any) -> Any:
    """Handler that receives the single request itself, within HEALTH_S: gRPC would wait without a timeout."""

    async def answer(requests: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(HEALTH_S):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request did not arrive within {HEALTH_S:g} s")
        return await (handler.unary_stream or handler.unary_unary)(request, context)

    make = HANDLERS[True, bool(handler.response_streaming)]
    return make(answer, handler.request_deserializer, handler.response_serializer)
