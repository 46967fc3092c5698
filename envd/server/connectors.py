"""Run connectors (envd/tools/connectors): Python programs in the sandbox, whose output is bounded and never trusted."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from envd.calling import PYTHON_GRACE_S
from envd.guest.link import GuestLink
from envd.server.guestprocess import candidates, run_in_guest
from envd.tools import connectors
from envd.tools.files import ToolError
from envd.tools.output import Output
from envd.types import ToolCall, ToolResult

MAX_CALL_BYTES = 120_000
"""Of a call's arguments as JSON: Linux passes at most 128 KiB in one argument of a program."""
_MODULES = {"sql": ("sql",), "http": ("web",), "browse": ("web", "browse"), "python": ("interpreter",)}
_FRAME = re.compile(rb"(ok|failed|late) (\d{1,18}) (\d{1,5}) (\d{1,5})\n")


async def run_connector(guest: GuestLink, call: ToolCall, timeout_s: float) -> ToolResult:
    """Run a call whose arguments are valid. Raises ToolError, OSError, TimeoutError."""
    arguments = dict(call.arguments)
    if call.name == "python":
        arguments["timeout_s"] = timeout_s = min(timeout_s, arguments.get("timeout_s", timeout_s))
        arguments["resident"] = _source("resident")
        timeout_s += PYTHON_GRACE_S
    sent = json.dumps(arguments)
    if len(sent) > MAX_CALL_BYTES:
        raise ToolError(f"error: {call.name}: the call is too long: put long text into a file")
    program = ["-I", "-S", "-X", "utf8", "-c", _source("main"), _modules(call.name), sent]
    done = await run_in_guest(guest, candidates("python3"), program, timeout_s=timeout_s)
    if done is None:
        raise ToolError(f"error: {call.name} needs python3 in the sandbox")
    if done.timed_out:
        raise TimeoutError
    frame = _FRAME.match(done.stdout)
    if frame is None:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.code}"])[-1]
        raise ToolError(f"error: {call.name} failed in the sandbox: {last[:200]}")
    middle = frame.end() + int(frame[3])
    end = middle + int(frame[4])
    output = Output.of_parts(done.stdout[frame.end() : middle], done.stdout[middle:end], int(frame[2]))
    note = Output()
    note.feed(done.stdout[end:])
    text = "\n".join(filter(None, [output.text().removesuffix("\n"), note.text()]))
    return ToolResult(frame[1] == b"ok", text, output.true_bytes, output.truncated, frame[1] == b"late")


@functools.cache
def _modules(tool: str) -> str:
    """JSON of the names and sources of a tool's modules, as main.py reads them."""
    return json.dumps([(f"{connectors.__name__}.{each}", _source(each)) for each in ("answers", *_MODULES[tool])])


@functools.cache
def _source(module: str) -> str:
    return Path(connectors.__path__[0], f"{module}.py").read_text()
