"""The trail of calls: caller, arguments and result of each call as audit events. `python -m envd serve --audit-calls`.

    call.begun   at the start of a call that runs code or streams its answers, so that the log of a killed server has it
    call.made    at the end of any call: its status code and seconds, and either its recorded fields or the number of
                 its call.begun

The recorded fields of a request are listed here one by one: never tokens, keys, values of variables or contents of
files.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

from contracts.rpc import caller
from envd.server.audit import AuditLog
from envd.server.observing import Stream
from envd.server.service_tools import MAX_CALLS

_SERVICES = frozenset({"Sandboxes", "Operations", "Files", "Processes", "Tools", "Verifier"})
_PLAIN = ("path", "source", "target", "pattern", "recursive", "process", "signal", "template", "backend", "follow")
"""Fields recorded of any request that has them."""
_COUNTED = ("tests", "files", "requests", "sandbox_ids", "hidden_files")
_MEASURED = ("data", "diff")
_TOLD = ("command", "path", "pattern", "query", "method", "action", "url", "code")
"""Arguments of tool calls that are recorded."""
_STREAMS = frozenset({"Processes/Connect", "Files/Watch", "Files/Download", "Operations/Audit"})
_RUNS = frozenset({"Processes/Start", "Verifier/Verify"})
_MAX_WORDS, _MAX_WORD = 3000, 480
"""Maximum characters of all tool calls of a batch or all arguments of a program, shared evenly, and of one of them."""
_MAX_NAME = 24
_MAX_PIECES = 32
"""Maximum number of list items in an audit event."""
_MAX_PARSED = 1 << 20
"""Maximum length of arguments that are parsed; of longer ones only the length is recorded."""


class Trail:
    """Observer (`envd.server.observing.Observer`) that records each call."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """See `envd.server.observing.Observer`."""
        if method.partition("/")[0] not in _SERVICES:
            return _nothing
        caller.answering(context, method)
        began, begun = time.monotonic(), None
        if method in _STREAMS or method in _RUNS or (method == "Tools/Batch" and _runs_code(request)):
            begun = self._audit.record("call.begun", _sandbox(request), method=method, **about(method, request))

        def end(code: str) -> None:
            said = {"begun": begun.number} if begun is not None else about(method, request)
            seconds = round(time.monotonic() - began, 6)
            self._audit.record("call.made", _sandbox(request), method=method, code=code, seconds=seconds, **said)

        return end


def about(method: str, request: Any) -> dict[str, Any]:
    """Recorded fields of a request."""
    request = _head(request)
    if request is None:
        return {}
    said: dict[str, Any] = {}
    for name, key, counts in _fields(request.DESCRIPTOR):
        if value := getattr(request, name):
            said[key] = len(value) if counts else value
    if method == "Tools/Batch":
        calls, share = request.calls[:MAX_CALLS], _share(len(request.calls))
        said["calls"] = _pieces([_tool(call, share) for call in calls])
    elif method == "Processes/Start":
        words = request.arguments[:MAX_CALLS]
        share = _share(len(words))
        said["arguments"] = _pieces([word[:share] for word in words])
    return said


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    """Recorded fields of a message type: (field, key in the event, whether to record its length, not its value)."""
    names = kind.fields_by_name
    plain = [(name, name, False) for name in _PLAIN if name in names]
    counted = [(name, name, True) for name in _COUNTED if name in names]
    return (*plain, *counted, *((name, f"{name}_bytes", True) for name in _MEASURED if name in names))


def _tool(call: Any, share: int) -> str:
    """Name of a tool call and the beginnings of its recorded arguments."""
    name = call.name[:_MAX_NAME]
    if len(call.arguments_json) > _MAX_PARSED:
        return f"{name} ({len(call.arguments_json)} characters)"
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        return f"{name} (no JSON)"
    if not isinstance(arguments, dict):
        return f"{name} (no object)"
    return " ".join([name, *(str(arguments[key])[:share] for key in _TOLD if key in arguments)])


def _pieces(words: list[str]) -> list[str]:
    """Join words so that at most _MAX_PIECES remain."""
    size = -(-len(words) // _MAX_PIECES) or 1
    return [" | ".join(words[at : at + size]) for at in range(0, len(words), size)]


def _share(count: int) -> int:
    """Maximum characters of each of `count` items, without its name and separator."""
    return min(max(_MAX_WORDS // max(count, 1) - 8, 2), _MAX_WORD)


def _runs_code(request: Any) -> bool:
    return request is not None and any(call.name in ("exec", "python") for call in request.calls)


def _sandbox(request: Any) -> str:
    """Id of the sandbox that a request names; empty if none."""
    return str(getattr(_head(request), "sandbox_id", ""))


def _head(request: Any) -> Any:
    """Message with a call's fields: its request, or the header of a stream's first message; None if there is none."""
    return getattr(request.first, "header", None) if isinstance(request, Stream) else request


def _nothing(code: str) -> None:
    pass
