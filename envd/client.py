"""Client of the environment plane (grpc.aio).

async with SandboxClient(address) as client:
    template = await client.put_template({"calc.py": b"..."})
    sandbox = await client.create(template)
    result = await sandbox.call(ToolCall("read", {"path": "calc.py"}))
    diff = await sandbox.finish()
    verdict = await client.verify(template, diff, hidden, ["tests/test_hidden.py::test_adds"])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, cast

import grpc

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.errors import EnvdError, SandboxGone, SandboxStartError, ServerBusy, ServerUnavailable, TemplateError
from envd.types import (
    Limits,
    ServerInfo,
    TestOutcome,
    TestStatus,
    ToolCall,
    ToolResult,
    VerifyExit,
    VerifyResult,
)

__all__ = [
    "EnvdError",
    "Limits",
    "Sandbox",
    "SandboxClient",
    "SandboxGone",
    "ServerInfo",
    "TestOutcome",
    "ToolCall",
    "ToolResult",
    "VerifyResult",
]

MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
]
_RECONNECT_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
RPC_GRACE_S = 30.0
"""What an RPC may take beyond the tool's own deadline: queueing and transport on a busy machine."""


class SandboxClient:
    """A connection to one envd server. `address` is `unix:/path` or `host:port`. Holds no state but the channel.

    The first call waits for a server that still starts. Once one has answered, a server that has gone is an error at once,
    and a later call finds one that came back at the same address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel: grpc.aio.Channel | None = None
        self._answered = False

    async def __aenter__(self) -> SandboxClient:
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS + _RECONNECT_OPTIONS)
        self._sandboxes = rpc.SandboxesStub(self._channel)  # type: ignore[no-untyped-call]
        self._tools = rpc.ToolsStub(self._channel)  # type: ignore[no-untyped-call]
        self._verifier = rpc.VerifierStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def info(self) -> ServerInfo:
        """What the server is: its backend, whether it isolates, how many sandboxes live."""
        reply = await self._ask(self._sandboxes.Info, pb.InfoRequest(), RPC_GRACE_S)
        return ServerInfo(
            backend=reply.backend,
            isolation=reply.isolation,
            version=reply.version,
            live=reply.live,
            limits_enforced=tuple(reply.limits_enforced),
        )

    async def put_template(self, files: Mapping[str, bytes]) -> str:
        """Store the files of a workspace and return their digest. Idempotent.

        The workspace that sandboxes get is a git repository with these files in one commit, the same for ever.
        """
        request = pb.PutTemplateRequest(files=dict(files))
        return cast(str, (await self._ask(self._sandboxes.PutTemplate, request, RPC_GRACE_S)).digest)

    async def create(
        self, template: str, *, limits: Limits = Limits(), env: Mapping[str, str] | None = None
    ) -> Sandbox:
        """Start a sandbox with its own copy of the template's workspace; it answers calls when this returns."""
        request = pb.CreateRequest(template=template, limits=_limits(limits), env=dict(env or {}))
        reply = await self._ask(self._sandboxes.Create, request, RPC_GRACE_S)
        return Sandbox(self, reply.sandbox_id)

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden_files: Mapping[str, bytes],
        tests: Sequence[str],
        *,
        limits: Limits = Limits(),
        timeout_s: float = 10,
    ) -> VerifyResult:
        """Run the named tests (pytest node ids) on the template with `diff` applied, in a fresh sandbox.

        Hidden files are placed after the diff and win over it. Test configuration that the diff brings is ignored. However
        many verifications the server has before this one, waiting for them is no fault: only its own run has a deadline.
        """
        request = pb.VerifyRequest(
            template=template,
            diff=diff,
            hidden_files=dict(hidden_files),
            tests=tests,
            limits=_limits(limits),
            timeout_s=timeout_s,
        )
        reply = None
        while reply is None:
            with suppress(ServerBusy):  # it answered, so it works: queue again
                reply = await self._ask(self._verifier.Verify, request, timeout_s + 4 * RPC_GRACE_S)
        return VerifyResult(
            outcomes=tuple(
                TestOutcome(each.name, cast(TestStatus, each.status), each.message) for each in reply.outcomes
            ),
            exit=cast(VerifyExit, reply.exit),
            log=reply.log,
            seconds=reply.seconds,
        )

    async def _ask(self, method: Any, request: Any, timeout_s: float) -> Any:
        if self._channel is None:
            raise EnvdError("SandboxClient is not open: use it as `async with SandboxClient(address) as client`")
        try:
            reply = await method(request, timeout=timeout_s, wait_for_ready=not self._answered)
        except grpc.aio.AioRpcError as error:
            _raise_typed(error, self.address)
        self._answered = True
        return reply


class Sandbox:
    """One live sandbox of a `SandboxClient`. Leaving its `async with` block closes it."""

    def __init__(self, client: SandboxClient, sandbox_id: str) -> None:
        self.id = sandbox_id
        self._client = client

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(self, call: ToolCall, *, timeout_s: float = 10) -> ToolResult:
        """Run one tool call. A tool that fails answers `ok=False`; an exception means the sandbox itself failed."""
        return (await self.batch([call], timeout_s=timeout_s))[0]

    async def batch(self, calls: Sequence[ToolCall], *, timeout_s: float = 10) -> list[ToolResult]:
        """Run the calls of one turn and answer in request order; adjacent `exec` calls run at the same time."""
        request = pb.BatchRequest(
            sandbox_id=self.id,
            calls=[
                pb.ToolCall(name=call.name, arguments_json=json.dumps(_flat(call.arguments), sort_keys=True))
                for call in calls
            ],
            timeout_s=timeout_s,
        )
        deadline_s = timeout_s * max(1, len(calls)) + RPC_GRACE_S
        reply = await self._client._ask(self._client._tools.Batch, request, deadline_s)
        return [
            ToolResult(each.ok, each.text, each.true_bytes, each.truncated, each.timed_out, each.seconds)
            for each in reply.results
        ]

    async def diff(self) -> bytes:
        """The workspace against its template: git format, binary-safe, the same bytes for the same state."""
        request = pb.DiffRequest(sandbox_id=self.id)
        return cast(bytes, (await self._client._ask(self._client._sandboxes.Diff, request, RPC_GRACE_S)).diff)

    async def finish(self) -> bytes:
        """Return the diff and destroy the sandbox, in one round trip."""
        request = pb.DeleteRequest(sandbox_id=self.id, want_diff=True)
        return cast(bytes, (await self._client._ask(self._client._sandboxes.Delete, request, RPC_GRACE_S)).diff)

    async def close(self) -> None:
        """Destroy the sandbox. Closing it twice is harmless."""
        request = pb.DeleteRequest(sandbox_id=self.id)
        await self._client._ask(self._client._sandboxes.Delete, request, RPC_GRACE_S)


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they are sent. No tool takes lists or objects, so one is as wrong empty as nested beyond what JSON readers bear."""
    return {key: [] if isinstance(value, (list, dict)) else value for key, value in arguments.items()}


def _limits(limits: Limits) -> pb.Limits:
    return pb.Limits(
        memory_mb=limits.memory_mb,
        pids=limits.pids,
        cpu=limits.cpu,
        disk_mb=limits.disk_mb,
        lifetime_s=limits.lifetime_s,
    )


def _raise_typed(error: grpc.aio.AioRpcError, address: str) -> NoReturn:
    detail = error.details() or error.code().name
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise ServerUnavailable(
            f"envd at {address} did not answer ({detail}); check that `python -m envd serve` runs there"
        ) from error
    kinds: dict[grpc.StatusCode, type[EnvdError]] = {
        grpc.StatusCode.NOT_FOUND: SandboxGone,
        grpc.StatusCode.FAILED_PRECONDITION: TemplateError,
        grpc.StatusCode.RESOURCE_EXHAUSTED: SandboxStartError,
        grpc.StatusCode.ABORTED: ServerBusy,
    }
    raise kinds.get(code, EnvdError)(detail) from error
