"""Run the tool calls of one turn in a sandbox, over its agent's stream.

Calls are answered in request order, and each sees the effects of those before it. Adjacent read-only calls (read, list,
search) run concurrently; adjacent `exec` calls go out together, as commands of one SHELL request. The texts of file
tools equal those on a local directory (tests/envd/local_tools.py), byte for byte.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from contracts.visible import visible
from envd.calling import PYTHON_GRACE_S
from envd.errors import EnvdError
from envd.guest.link import GuestLink, ShellResult
from envd.server.connectors import run_connector
from envd.server.linting import lint
from envd.server.semantic import semantic_search
from envd.server.textsearch import search_text
from envd.tools.files import (
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    Listing,
    Load,
    Need,
    Store,
    ToolError,
    too_large,
    too_many,
    tool_error,
    tool_steps,
)
from envd.tools.output import MAX_OUTPUT_BYTES, Output
from envd.tools.paths import relative
from envd.tools.schemas import CONNECTORS, check_arguments
from envd.types import ToolCall, ToolResult

SHELL_DIED = "; shell restarted"
"""End of the last line of a command's answer if its shell died. The server writes that line, after the output."""
_LOOKING = frozenset({"read", "list", "search", "lint", "semantic_search"})
_PROCESSES = frozenset({"search", "lint"})
"""Tools that run a process in the sandbox: one at a time, so that together they do not reach its process limit."""
_INLINE_BYTES = 64 * 1024
_INLINE_ENTRIES = 1000
"""Larger contents are processed in a thread, so that one sandbox's content does not delay the calls of others."""


async def run_batch(guest: GuestLink, calls: Sequence[ToolCall], timeout_s: float) -> list[ToolResult]:
    """Run calls and return their results in request order. A failure or a timeout of timeout_s is a result, too.

    Raises SandboxGone if the sandbox itself ended. If cancelled, it cancels the running calls in the sandbox.
    """
    if len(calls) == 1 and calls[0].name != "exec":
        return [await _one(guest, calls[0], timeout_s)]
    results: list[ToolResult] = []
    for kind, group in _groups(calls):
        if kind == "exec":
            results += await _shell(guest, group, timeout_s)
        elif len(group) == 1:
            results.append(await _one(guest, group[0], timeout_s))
        else:
            results += await _together(guest, group, timeout_s)
    return results


async def _together(guest: GuestLink, calls: Sequence[ToolCall], timeout_s: float) -> list[ToolResult]:
    turn = asyncio.Lock()

    async def one(call: ToolCall) -> ToolResult:
        if call.name not in _PROCESSES:
            return await _one(guest, call, timeout_s)
        async with turn:
            return await _one(guest, call, timeout_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(call)) for call in calls]
    return [task.result() for task in tasks]


async def _one(guest: GuestLink, call: ToolCall, timeout_s: float) -> ToolResult:
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s + (PYTHON_GRACE_S if call.name == "python" else 0)):
            result = await _drive(guest, call, timeout_s)
    except TimeoutError:
        text = f"timed out after {timeout_s:g} s"
        result = ToolResult(False, text, len(text), timed_out=True)
    except EnvdError:
        raise
    except Exception as error:  # noqa: BLE001 - any failure of a call is its result and must not end the sandbox
        result = _failed(error)
    seconds = time.monotonic() - started
    return ToolResult(result.ok, result.text, result.true_bytes, result.truncated, result.timed_out, seconds)


async def _drive(guest: GuestLink, call: ToolCall, timeout_s: float) -> ToolResult:
    if call.name == "exec" and check_arguments(call.name, call.arguments) is None:
        os.fsencode(call.arguments["command"])
    if call.name in (_SANDBOX_TOOLS | CONNECTORS) and check_arguments(call.name, call.arguments) is None:
        return await _in_sandbox(guest, call, timeout_s)
    steps = tool_steps(call)
    need = _advance(steps, None)
    while not isinstance(need, ToolResult):
        try:
            answer = await _answer(guest, need, timeout_s)
        except TimeoutError:
            raise
        except (OSError, ToolError, ValueError) as error:
            need = _advance(steps, error)
        else:
            need = await (asyncio.to_thread(_advance, steps, answer) if _is_large(answer) else _now(steps, answer))
    return need


async def _in_sandbox(guest: GuestLink, call: ToolCall, timeout_s: float) -> ToolResult:
    """Run a connector or a tool of _SANDBOX_TOOLS, which a local directory does not offer."""
    path = call.arguments.get("path", ".")
    output = Output()
    try:
        if call.name in CONNECTORS:
            return await run_connector(guest, call, timeout_s)
        output.feed((await _SANDBOX_TOOLS[call.name](guest, call, timeout_s)).encode("utf-8", "surrogateescape"))
    except TimeoutError:
        raise
    except (ToolError, OSError) as error:
        said = str(tool_error(error, path)).encode("utf-8", "replace")  # a path may hold a lone surrogate
        return ToolResult(False, visible(said.decode()), len(said))
    return ToolResult(True, output.text(), output.true_bytes, output.truncated)


async def _lint(guest: GuestLink, call: ToolCall, timeout_s: float) -> str:
    return await lint(guest, call.arguments.get("path", "."), timeout_s)


async def _semantic_search(guest: GuestLink, call: ToolCall, timeout_s: float) -> str:
    return await semantic_search(guest, call.arguments)


_SANDBOX_TOOLS = {"lint": _lint, "semantic_search": _semantic_search}
"""Tools that need more than a workspace's files, other than `exec`."""


def _advance(steps: Generator[Need, Any, ToolResult], answer: Any) -> Need | ToolResult:
    """Pass an answer to a tool and return its next need or its result. An exception is thrown into the tool."""
    try:
        return steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration as end:
        result: ToolResult = end.value
        return result


async def _now(steps: Generator[Need, Any, ToolResult], answer: Any) -> Need | ToolResult:
    return _advance(steps, answer)


def _is_large(answer: Any) -> bool:
    if isinstance(answer, bytes):
        return len(answer) > _INLINE_BYTES
    return isinstance(answer, list) and len(answer) > _INLINE_ENTRIES


async def _answer(guest: GuestLink, need: Need, timeout_s: float) -> Any:
    """Fulfil a tool's need in the sandbox and return the answer."""
    if isinstance(need, Load):
        try:
            return (await guest.read_all(relative(need.path), MAX_FILE_BYTES))[1]
        except OSError as error:
            raise too_large(need.path) if error.errno == errno.EFBIG else error from None
    if isinstance(need, Store):
        return await guest.write(relative(need.path), need.data, parents=need.create, in_place=True)
    if isinstance(need, Listing):
        found, cut = await guest.list(relative(need.path), depth=need.depth, limit=MAX_ENTRIES, skip_hidden=True)
        if cut:
            raise too_many(need.path)
        return [(entry.path, entry.type == "directory") for entry in found]
    return await search_text(guest, need, timeout_s)


def _failed(error: Exception) -> ToolResult:
    text = f"error: the tool failed: {type(error).__name__}"
    return ToolResult(False, text, len(text))


async def _shell(guest: GuestLink, calls: Sequence[ToolCall], timeout_s: float) -> list[ToolResult]:
    commands = [(call.arguments["command"], _deadline(call, timeout_s)) for call in calls]
    started = time.monotonic()
    try:
        ended = await guest.shell(commands, limit=MAX_OUTPUT_BYTES)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            return [_failed(error)] * len(calls)
        if len(calls) > 1:  # too large together
            return [result for call in calls for result in await _shell(guest, [call], timeout_s)]
        text = "error: the command is too long: write it to a file, then run that file"
        return [ToolResult(False, text, len(text))]
    seconds = time.monotonic() - started
    return [_shell_result(result, deadline_s, seconds) for result, (_, deadline_s) in zip(ended, commands, strict=True)]


def _deadline(call: ToolCall, timeout_s: float) -> float:
    own = float(call.arguments.get("timeout_s", timeout_s))
    return min(timeout_s, own) if own > 0 else timeout_s


def _shell_result(result: ShellResult, deadline_s: float, seconds: float) -> ToolResult:
    if result.timed_out:
        last = f"timed out after {deadline_s:g} s; shell restarted"
    else:
        last = f"exit {result.code}" + (SHELL_DIED if result.died else "")
    output = Output.of_parts(result.head, result.tail, result.true_bytes)
    text = output.text()
    if text and not text.endswith("\n"):
        text += "\n"
    ok = result.code == 0 and not result.timed_out and not result.died
    return ToolResult(ok, text + last, output.true_bytes, output.truncated, result.timed_out, seconds)


def _groups(calls: Sequence[ToolCall]) -> Iterator[tuple[str, list[ToolCall]]]:
    """Group adjacent calls that run together: commands, or read-only calls. Every other call is a group of its own."""
    kind = ""
    group: list[ToolCall] = []
    for call in calls:
        its = _kind(call)
        if group and not (its == kind and kind):
            yield kind, group
            group = []
        kind = its
        group.append(call)
    if group:
        yield kind, group


def _kind(call: ToolCall) -> str:
    if call.name in _LOOKING:
        return "look"
    return "exec" if call.name == "exec" and _runs(call) else ""


def _runs(call: ToolCall) -> bool:
    if check_arguments(call.name, call.arguments) is not None:
        return False
    try:
        os.fsencode(call.arguments["command"])
    except UnicodeEncodeError:
        return False
    return True
