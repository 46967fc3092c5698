"""Errors of the bridge as gRPC statuses, bytes that are no message, and whose call is answered."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from contracts.errors import TriplaneError
from contracts.rpc import caller
from contracts.rpc.connecting import ERROR_NAME
from inference import errors as inference_errors
from inference.bridge import errors

Context = grpc.aio.ServicerContext[Any, Any]
_Code = grpc.StatusCode
_CODES: tuple[tuple[type[TriplaneError], grpc.StatusCode], ...] = (
    (errors.BadMessage, _Code.INVALID_ARGUMENT),
    (errors.UnknownEpisode, _Code.NOT_FOUND),
    (errors.EpisodeExpired, _Code.NOT_FOUND),
    (errors.UnknownTask, _Code.NOT_FOUND),
    (errors.EpisodeDone, _Code.FAILED_PRECONDITION),
    (errors.GradingFailed, _Code.UNAVAILABLE),
    (errors.EpisodeConflict, _Code.ALREADY_EXISTS),
    (errors.WrongStep, _Code.FAILED_PRECONDITION),
    (errors.EpisodeEnded, _Code.FAILED_PRECONDITION),
    (errors.TooManyEpisodes, _Code.RESOURCE_EXHAUSTED),
    (errors.TooManySteps, _Code.RESOURCE_EXHAUSTED),
    (errors.Draining, _Code.UNAVAILABLE),
    (errors.JournalError, _Code.UNAVAILABLE),
    (inference_errors.StaleVersion, _Code.FAILED_PRECONDITION),
    (inference_errors.EngineStopped, _Code.UNAVAILABLE),
    (inference_errors.EngineUnreachable, _Code.UNAVAILABLE),
    (inference_errors.EngineError, _Code.INVALID_ARGUMENT),
)
_CERTIFICATE = ("x509_common_name", "x509_subject_alternative_name")
"""Names in a certificate, as gRPC gives them. They stay when a certificate is renewed."""
_MAX_WORDS = 2000
"""Longest message of a status, in characters: gRPC sends it in a header of limited size."""


def owner_of(context: Context) -> str:
    """Name of who sees the episodes of a call: its key, else the names in its client certificate, else empty."""
    name = caller.key()
    if name:
        return name
    about = context.auth_context()
    names = [each for field in _CERTIFICATE for each in about.get(field, ())]
    return hashlib.sha256(b"\0".join(names)).hexdigest()[:12] if names else ""


def code_of(error: TriplaneError) -> grpc.StatusCode:
    """gRPC status code for an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), _Code.INTERNAL)


def words_of(error: TriplaneError) -> str:
    """Message of an error, as long as a status may be."""
    return str(error)[:_MAX_WORDS]


async def abort(context: Context, error: TriplaneError) -> NoReturn:
    """End a call with the status and the class name of an error."""
    await context.abort(code_of(error), words_of(error), ((ERROR_NAME, type(error).__name__),))
    raise error


class Unreadable(grpc.aio.ServerInterceptor):
    """Interceptor that hands on None for bytes that are no message of the method, so that it can name the error.

    gRPC itself would answer UNKNOWN and log a trace.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        return handler._replace(request_deserializer=_lenient(handler.request_deserializer))


def check_read(message: Any) -> None:
    """Raise BadMessage for what `Unreadable` hands on."""
    if message is None:
        raise errors.BadMessage("the bytes are no message of this method: is the client of another protocol?")


def _lenient(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def message(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return None

    return message
