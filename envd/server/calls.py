"""Common parts of the servicers' methods: metadata, idempotency, and errors as gRPC statuses.

@unary                             handles the idempotency key, turns errors into statuses
@streaming                         the same without the key: a client resumes a stream by its offsets
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from contracts.errors import describe, first_error
from contracts.rpc import caller
from contracts.rpc.connecting import ERROR_NAME
from envd import errors
from envd.connection import ERROR_NUMBER, IDEMPOTENCY_KEY, SANDBOX_TOKEN
from envd.server.audit import Kind
from envd.server.live import Live
from envd.server.sandboxes import Sandboxes

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
_Code = grpc.StatusCode
_CODES: tuple[tuple[type[errors.EnvdError], grpc.StatusCode], ...] = (
    (errors.SandboxGone, _Code.NOT_FOUND),
    (errors.TemplateError, _Code.FAILED_PRECONDITION),
    (errors.WrongState, _Code.FAILED_PRECONDITION),
    (errors.SandboxStartError, _Code.RESOURCE_EXHAUSTED),
    (errors.QuotaExceeded, _Code.RESOURCE_EXHAUSTED),
    (errors.ServerBusy, _Code.ABORTED),
    (errors.ServerDraining, _Code.UNAVAILABLE),
    (errors.Unsupported, _Code.UNIMPLEMENTED),
    (errors.RulesDenied, _Code.PERMISSION_DENIED),
    (errors.AccessDenied, _Code.UNAUTHENTICATED),
    (errors.IdempotencyError, _Code.ALREADY_EXISTS),
    (errors.MigrationError, _Code.ABORTED),
)
_FILE_CODES = {
    errno.ENOENT: _Code.NOT_FOUND,
    errno.EEXIST: _Code.ALREADY_EXISTS,
    errno.ENOTEMPTY: _Code.FAILED_PRECONDITION,
    errno.EACCES: _Code.PERMISSION_DENIED,
    errno.EPERM: _Code.PERMISSION_DENIED,
    errno.EROFS: _Code.PERMISSION_DENIED,
    errno.ENOSPC: _Code.RESOURCE_EXHAUSTED,
    errno.EDQUOT: _Code.RESOURCE_EXHAUSTED,
    errno.EFBIG: _Code.RESOURCE_EXHAUSTED,
    errno.ESRCH: _Code.NOT_FOUND,
    errno.EAGAIN: _Code.RESOURCE_EXHAUSTED,
}
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IMPOSSIBLE = frozenset({errno.EINVAL, errno.ENAMETOOLONG, errno.EBUSY})
"""Errors of invalid file names, and of operations on the workspace itself."""
_MAX_WORDS = 2000
"""Maximum length of a status message, in characters: gRPC sends it in a header of limited size."""
_log = logging.getLogger("envd")


class Service:
    """Base of the servicers: finds the sandbox that a request names and checks its rules."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self.sandboxes = sandboxes

    def live(self, request: Any, context: Context) -> Live:
        """Live sandbox that a request names. Raises SandboxGone for an unknown id or a wrong token."""
        return self.sandboxes.find(request.sandbox_id, metadata_of(context, SANDBOX_TOKEN))

    def tool_allowed(self, live: Live, tool: str) -> None:
        """Raise RulesDenied, and record it, if the sandbox's rules forbid a tool."""
        if not live.decisions.allows(tool):
            self.sandboxes.audit.record("tool.denied", live.identity, tool=tool)
            raise errors.RulesDenied(f"the rules of sandbox {live.identity[:40]} do not allow {tool}")


def unary(method: Callable[[Any, Any, Context], Awaitable[T]]) -> Callable[[Any, Any, Context], Awaitable[T]]:
    """Wrap a servicer's unary method: handle its idempotency key and turn errors into statuses."""

    @functools.wraps(method)
    async def answer(service: Any, request: Any, context: Context) -> T:
        try:
            key = metadata_of(context, IDEMPOTENCY_KEY)
            if not key or not isinstance(request, Message):  # request streams have no key
                return await method(service, request, context)
            sandboxes: Sandboxes = service.sandboxes
            identity = getattr(request, "sandbox_id", "")
            token = metadata_of(context, SANDBOX_TOKEN)
            kept = sandboxes.answers_of(identity, token) if identity else sandboxes.answers[caller.key()]
            reply: T = await kept.once(key, request, lambda: method(service, request, context))
            return reply
        except (errors.EnvdError, OSError) as error:
            await abort(service, request, context, error)
        except ExceptionGroup as group:  # from concurrent tool calls, e.g. in a sandbox that ended meanwhile
            known = group.subgroup((errors.EnvdError, OSError))
            if known is None:
                raise
            first = first_error(known)
            assert isinstance(first, Exception)
            await abort(service, request, context, first)

    return answer


def streaming(
    method: Callable[[Any, Any, Context], AsyncIterator[T]],
) -> Callable[[Any, Any, Context], AsyncIterator[T]]:
    """Wrap a servicer's streaming method: turn errors into statuses."""

    @functools.wraps(method)
    async def answer(service: Any, request: Any, context: Context) -> AsyncIterator[T]:
        try:
            async for each in method(service, request, context):
                yield each
        except (errors.EnvdError, OSError) as error:
            await abort(service, request, context, error)

    return answer


def metadata_of(context: Context, key: str) -> str:
    """Value of a request's metadata key; empty if it is absent."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


async def abort(service: Service, request: Any, context: Context, error: Exception) -> NoReturn:
    """End a call with the status and the class name of an error, so that the client raises the same error."""
    code = code_of(error)
    if isinstance(error, OSError):
        _log.error("a call failed on this machine", exc_info=error)
        error = errors.EnvdError(f"the server failed: {describe(error)}")
    identity = getattr(request, "sandbox_id", "")
    if code is _Code.INVALID_ARGUMENT or isinstance(error, errors.TemplateError):
        # counted for the sandbox if its token is right, so that a flood elsewhere does not suppress it
        own = identity if service.sandboxes.knows(identity, metadata_of(context, SANDBOX_TOKEN)) else ""
        service.sandboxes.audit.record("request.refused", own, method=type(request).__name__, reason=str(error))
    if isinstance(error, errors.FileError) and (error.errno in _FULL or error.errno in _IMPOSSIBLE):
        kind: Kind = "limit.disk" if error.errno in _FULL else "request.refused"
        service.sandboxes.audit.record(kind, identity, reason=str(error))
    if isinstance(error, errors.SandboxGone):
        service.sandboxes.notice(identity)
    number = error.errno if isinstance(error, errors.FileError) else 0
    trailing = ((ERROR_NAME, type(error).__name__), (ERROR_NUMBER, str(number)))
    await context.abort(code, str(error)[:_MAX_WORDS], trailing)
    raise error


def code_of(error: Exception) -> grpc.StatusCode:
    """gRPC status code for an error."""
    if isinstance(error, errors.FileError):
        return _FILE_CODES.get(error.errno, _Code.FAILED_PRECONDITION)
    if isinstance(error, errors.EnvdError):
        return next((code for kind, code in _CODES if isinstance(error, kind)), _Code.INVALID_ARGUMENT)
    return _Code.INTERNAL
