"""Tool calls of one turn on a sandbox, over its agent's stream.

Calls are answered in request order, and each sees what those before it did. Calls that only look (read, list, search)
and stand side by side run at the same time; so do `exec` calls, as commands of one SHELL ask. The texts are what
`run_file_tool` gives on a local directory, byte for byte.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from contracts.visible import visible
from envd.errors import EnvdError
from envd.guest.link import GuestLink, ShellResult
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
from envd.tools.schemas import check_arguments
from envd.types import ToolCall, ToolResult

SHELL_DIED = "; shell restarted"
"""How the last line of a command's answer ends where its shell died. That line is the server's: output stands before
it.
"""
_LOOKING = frozenset({"read", "list", "search", "lint", "semantic_search"})
_PROCESSES = frozenset({"search", "lint"})
"""Tools that run a process in the sandbox: one at a time, so that they do not meet its limit of processes together."""
_INLINE_BYTES = 64 * 1024
_INLINE_ENTRIES = 1000
"""Beyond these the work is a thread's, so that no sandbox's content holds others' calls up."""


async def run_batch(guest: GuestLink, calls: Sequence[ToolCall], timeout_s: float) -> list[ToolResult]:
    """Run calls and answer in request order. A call that fails, or takes longer than timeout_s, is answered so.

    Raises SandboxGone where the sandbox itself ended. Cancelled, it cancels what runs: nothing goes on in the sandbox.
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
        async with asyncio.timeout(timeout_s):
            result = await _drive(guest, call, timeout_s)
    except TimeoutError:
        text = f"timed out after {timeout_s:g} s"
        result = ToolResult(False, text, len(text), timed_out=True)
    except EnvdError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a call brings about is its answer, not the sandbox's end
        result = _failed(error)
    seconds = time.monotonic() - started
    return ToolResult(result.ok, result.text, result.true_bytes, result.truncated, result.timed_out, seconds)


async def _drive(guest: GuestLink, call: ToolCall, timeout_s: float) -> ToolResult:
    if call.name == "exec" and check_arguments(call.name, call.arguments) is None:
        os.fsencode(call.arguments["command"])
    if call.name in _SANDBOX_TOOLS and check_arguments(call.name, call.arguments) is None:
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
    """A tool that no local directory has."""
    path = call.arguments.get("path", ".")
    output = Output()
    try:
        output.feed((await _SANDBOX_TOOLS[call.name](guest, call, timeout_s)).encode("utf-8", "surrogateescape"))
    except TimeoutError:
        raise
    except (ToolError, OSError) as error:
        said = str(tool_error(error, path)).encode("utf-8", "replace")  # a path may hold half a character
        return ToolResult(False, visible(said.decode()), len(said))
    return ToolResult(True, output.text(), output.true_bytes, output.truncated)


async def _lint(guest: GuestLink, call: ToolCall, timeout_s: float) -> str:
    return await lint(guest, call.arguments.get("path", "."), timeout_s)


async def _semantic_search(guest: GuestLink, call: ToolCall, timeout_s: float) -> str:
    return await semantic_search(guest, call.arguments)


_SANDBOX_TOOLS = {"lint": _lint, "semantic_search": _semantic_search}
"""Tools that need more than a workspace's files, other than `exec`."""


def _advance(steps: Generator[Need, Any, ToolResult], answer: Any) -> Need | ToolResult:
    """The next thing a tool needs, or its result. An answer that is an exception is thrown in."""
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
    """What the sandbox has to say."""
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
        return [_failed(error)] * len(calls)
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
    """Neighbours that run at the same time: commands, or calls that only look. Everything else alone."""
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
