"""The gRPC servicers: requests checked and converted, errors given their status codes."""

from __future__ import annotations

import json
import time
from typing import Any, NoReturn

import grpc

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.errors import EnvdError, SandboxGone, SandboxStartError, ServerBusy, TemplateError
from envd.server.sandboxes import Sandboxes
from envd.types import Limits

Context = grpc.aio.ServicerContext[Any, Any]
_CODES: tuple[tuple[type[EnvdError], grpc.StatusCode], ...] = (
    (SandboxGone, grpc.StatusCode.NOT_FOUND),
    (TemplateError, grpc.StatusCode.FAILED_PRECONDITION),
    (SandboxStartError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ServerBusy, grpc.StatusCode.ABORTED),
)
MAX_TIMEOUT_S = 3600.0
MAX_CALLS = 256
"""Calls of one batch that are run."""
_SURPLUS = f"error: not run: a turn may hold at most {MAX_CALLS} calls"


class SandboxesService(rpc.SandboxesServicer):
    """Templates and the life of sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoReply:
        """What the server is."""
        info = self._sandboxes.info()
        return pb.InfoReply(
            backend=info.backend,
            isolation=info.isolation,
            version=info.version,
            live=info.live,
            limits_enforced=info.limits_enforced,
        )

    async def PutTemplate(self, request: pb.PutTemplateRequest, context: Context) -> pb.PutTemplateReply:
        """Store a template."""
        try:
            return pb.PutTemplateReply(digest=await self._sandboxes.templates.put(request.files))
        except EnvdError as error:
            await _abort(context, error)

    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateReply:
        """Start a sandbox."""
        try:
            limits = _limits(request.limits)
            return pb.CreateReply(sandbox_id=await self._sandboxes.create(request.template, limits, request.env))
        except EnvdError as error:
            await _abort(context, error)

    async def Diff(self, request: pb.DiffRequest, context: Context) -> pb.DiffReply:
        """A sandbox's diff."""
        try:
            return pb.DiffReply(diff=await self._sandboxes.diff(request.sandbox_id))
        except EnvdError as error:
            await _abort(context, error)

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """End a sandbox."""
        try:
            diff = await self._sandboxes.diff(request.sandbox_id) if request.want_diff else b""
            await self._sandboxes.destroy(request.sandbox_id)
            return pb.DeleteReply(diff=diff)
        except EnvdError as error:
            await _abort(context, error)


class ToolsService(rpc.ToolsServicer):
    """Tool calls."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def Batch(self, request: pb.BatchRequest, context: Context) -> pb.BatchReply:
        """Run tool calls in a sandbox."""
        try:
            calls = [{"name": call.name, "arguments": _arguments(call)} for call in request.calls[:MAX_CALLS]]
            timeout_s = _timeout(request.timeout_s)
            results = await self._sandboxes.batch(request.sandbox_id, calls, timeout_s) if calls else []
            surplus = [pb.ToolResult(text=_SURPLUS, true_bytes=len(_SURPLUS))] * (len(request.calls) - len(calls))
            return pb.BatchReply(results=[pb.ToolResult(**result) for result in results] + surplus)
        except EnvdError as error:
            await _abort(context, error)


class VerifierService(rpc.VerifierServicer):
    """Verifications."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyReply:
        """Grade a final state."""
        started = time.monotonic()
        try:
            timeout_s = _timeout(request.timeout_s)
            left = context.time_remaining()
            result = await self._sandboxes.verify(
                request.template,
                request.diff,
                request.hidden_files,
                request.tests,
                _limits(request.limits),
                timeout_s,
                None if left is None else max((left - timeout_s) / 2, 0),
            )
            return pb.VerifyReply(
                outcomes=[pb.TestOutcome(**outcome) for outcome in result["outcomes"]],
                exit=result["exit"],
                log=result["log"],
                seconds=time.monotonic() - started,
            )
        except EnvdError as error:
            await _abort(context, error)


def _arguments(call: pb.ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError) as error:
        raise EnvdError(f"arguments of {call.name!r} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise EnvdError(f"arguments of {call.name!r} must be a JSON object")
    return arguments


def _limits(limits: pb.Limits) -> Limits:
    """Limits of a request; what it leaves at zero takes the default."""
    default = Limits()
    chosen = Limits(
        memory_mb=limits.memory_mb or default.memory_mb,
        pids=limits.pids or default.pids,
        cpu=limits.cpu or default.cpu,
        disk_mb=limits.disk_mb or default.disk_mb,
        lifetime_s=limits.lifetime_s or default.lifetime_s,
    )
    if not (chosen.memory_mb > 0 and chosen.pids > 0 and chosen.cpu > 0 and chosen.disk_mb > 0 < chosen.lifetime_s):
        raise EnvdError(f"limits must be positive: {chosen}")
    return chosen


def _timeout(seconds: float) -> float:
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise EnvdError(f"timeout_s is {seconds:g}: it must be above 0 and at most {MAX_TIMEOUT_S:g}")
    return seconds


async def _abort(context: Context, error: EnvdError) -> NoReturn:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INVALID_ARGUMENT)
    await context.abort(code, str(error))
    raise error
