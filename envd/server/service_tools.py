"""The Tools service: run an agent's tool calls."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

import jsonschema  # noqa: F401 - tools load it late; the first call need not wait for it

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from contracts.visible import visible
from envd.errors import EnvdError
from envd.messages import tool_result_message
from envd.server.audit import leaves_root
from envd.server.calls import Context, Service, unary
from envd.server.live import Live
from envd.server.toolrunner import SHELL_DIED, run_batch
from envd.tools import toolset_named
from envd.tools.schemas import CONNECTORS
from envd.types import ToolCall, ToolResult

MAX_TIMEOUT_S = 3600.0
MAX_CALLS = 256
"""Maximum number of calls of one batch that are run."""
_SURPLUS = f"error: not run: a turn may hold at most {MAX_CALLS} calls"
_SIGNS = frozenset({"exec", "write", "edit", "search", "lint", *CONNECTORS})
"""Tools whose failure may be caused by a limit."""


class ToolsService(Service, rpc.ToolsServicer):
    """Servicer for tool calls in sandboxes."""

    @unary
    async def Batch(self, request: pb.BatchRequest, context: Context) -> pb.BatchReply:
        """Run tool calls in a sandbox and answer in request order."""
        live = self.live(request, context)
        calls = [ToolCall(call.name, _arguments(call)) for call in request.calls[:MAX_CALLS]]
        timeout_s = checked_timeout(request.timeout_s)
        async with live.using() as guest:
            results = await self._run(live, guest, calls, timeout_s)
        surplus = len(request.calls) - len(calls)
        return pb.BatchReply(results=map(tool_result_message, [*results, *[_refusal(_SURPLUS)] * surplus]))

    async def _run(self, live: Live, guest: Any, calls: list[ToolCall], timeout_s: float) -> list[ToolResult]:
        for call in calls:
            path = call.arguments.get("path")
            if isinstance(path, str) and ".." in path and leaves_root(path):
                self.sandboxes.audit.record("path.escape", live.identity, tool=call.name, path=path)
        offered = toolset_named(live.toolset).tools
        denied = {
            index
            for index, call in enumerate(calls)
            if not live.decisions.allows(call.name) or call.name not in offered
        }
        if not denied:
            results = await run_batch(guest, calls, timeout_s)
        else:
            allowed = iter(await run_batch(guest, [c for i, c in enumerate(calls) if i not in denied], timeout_s))
            results = [
                self._deny(live, call, offered) if i in denied else next(allowed) for i, call in enumerate(calls)
            ]
        for call, result in zip(calls, results, strict=True):
            if not result.ok and call.name in _SIGNS:
                self.sandboxes.sign_of_limit(live)
            path = call.arguments.get("path")
            if not result.ok and isinstance(path, str) and "\0" not in path:
                self.sandboxes.sign_of_escape(live, path)
            if not result.ok and call.name != "exec" and "no space left for" in result.text:
                self.sandboxes.audit.record("limit.disk", live.identity, tool=call.name)
            if call.name == "exec" and not result.timed_out and result.text.endswith(SHELL_DIED):
                self.sandboxes.audit.record("shell.died", live.identity, how=result.text.rpartition("\n")[2])
            if result.timed_out or result.truncated:
                kind = "limit.time" if result.timed_out else "limit.output"
                self.sandboxes.audit.record(kind, live.identity, tool=call.name, bytes=result.true_bytes)  # type: ignore[arg-type]
        return results

    def _deny(self, live: Live, call: ToolCall, offered: Container[str]) -> ToolResult:
        self.sandboxes.audit.record("tool.denied", live.identity, tool=call.name)
        return _refusal(
            f"error: no such tool: {visible(call.name)}"
            if call.name not in offered
            else f"error: not allowed: {call.name}"
        )


def checked_timeout(seconds: float) -> float:
    """Return a request's timeout, in seconds. Raises EnvdError unless it is above 0 and at most MAX_TIMEOUT_S."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise EnvdError(f"timeout_s is {seconds:g}: it must be above 0 and at most {MAX_TIMEOUT_S:g}")
    return seconds


def _refusal(text: str) -> ToolResult:
    return ToolResult(False, text, len(text.encode()))


def _arguments(call: pb.ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError) as error:
        raise EnvdError(f"arguments of {call.name!r} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise EnvdError(f"arguments of {call.name!r} must be a JSON object")
    return arguments
