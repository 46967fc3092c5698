"""One call of a client: its deadline, its metadata, and the server's error as an exception of envd.errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import grpc

from contracts import tracing
from contracts.rpc.connecting import ERROR_NAME
from envd import errors
from envd.connection import ERROR_NUMBER, IDEMPOTENCY_KEY, Access, Metadata

RPC_GRACE_S = 30.0
"""What an RPC may take beyond the tool's own deadline: queueing and transport on a busy machine."""
PYTHON_GRACE_S = 5.0
"""What a call of the tool `python` may take, beyond its deadline, to interrupt the code and keep its variables."""
_KINDS: dict[grpc.StatusCode, type[errors.EnvdError]] = {
    grpc.StatusCode.NOT_FOUND: errors.SandboxGone,
    grpc.StatusCode.FAILED_PRECONDITION: errors.TemplateError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.SandboxStartError,
    grpc.StatusCode.ABORTED: errors.ServerBusy,
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: errors.RulesDenied,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
}
"""For servers that name no class."""


class Caller:
    """A channel to one server, and its calls."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self._access = access
        self._metadata = access.metadata
        self._channel: grpc.aio.Channel | None = None
        self._answered = False

    @property
    def key(self) -> str:
        """Bearer key of the server; empty if it asks for none."""
        return self._access.key or ""

    def open(self) -> grpc.aio.Channel:
        """Open the channel."""
        self._channel = self._access.channel(self.address)
        return self._channel

    def expect_answers(self) -> None:
        """Do not wait for a server that does not answer: it has been there."""
        self._answered = True

    async def close(self) -> None:
        """Close the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def ask(
        self, method: Any, request: Any, timeout_s: float, metadata: Metadata = (), key: str | None = None
    ) -> Any:
        """One unary call. metadata: the sandbox's token. key: of idempotency."""
        self._require_open()
        try:
            reply = await method(
                request, timeout=timeout_s, wait_for_ready=not self._answered, metadata=self._all(metadata, key)
            )
        except grpc.aio.AioRpcError as error:
            raise_typed(error, self.address)
        self._answered = True
        return reply

    async def stream(self, method: Any, request: Any, metadata: Metadata = ()) -> AsyncGenerator[Any, None]:
        """The answers of a call that streams, until it or its reader ends."""
        self._require_open()
        call = method(request, wait_for_ready=not self._answered, metadata=self._all(metadata, None))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise_typed(error, self.address)
        finally:
            call.cancel()

    def _require_open(self) -> None:
        if self._channel is None:
            raise errors.EnvdError("SandboxClient is not open: use it as `async with SandboxClient(address) as client`")

    def _all(self, metadata: Metadata, key: str | None) -> Metadata:
        keyed = ((IDEMPOTENCY_KEY, key),) if key is not None else ()
        return (*self._metadata, *metadata, *keyed, *tracing.carrier().items())


def error_of(code: int, words: str) -> errors.EnvdError:
    """An error that a reply tells of by the number of a gRPC status."""
    kind = next((kind for status, kind in _KINDS.items() if status.value[0] == code), errors.EnvdError)
    return kind(words)


def raise_typed(error: grpc.aio.AioRpcError, address: str) -> NoReturn:
    """Raise what the server said as the class that it named."""
    detail, code = error.details() or error.code().name, error.code()
    trailing = dict(error.trailing_metadata() or ())
    kind = getattr(errors, str(trailing.get(ERROR_NAME, "")), None)
    if isinstance(kind, type) and issubclass(kind, errors.EnvdError):
        if issubclass(kind, errors.FileError):
            raise kind(detail, int(trailing.get(ERROR_NUMBER, 0))) from error
        raise kind(detail) from error
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        broken = code is grpc.StatusCode.UNAVAILABLE
        raise (errors.ServerLost if broken else errors.ServerUnavailable)(
            f"envd at {address} did not answer ({detail}); check that `python -m envd serve` runs there"
        ) from error
    raise _KINDS.get(code, errors.EnvdError)(detail) from error
