"""The file tools: read, write, edit, list, search.

Each is a generator that asks for what it needs of the workspace (`Load`, `Store`, `Listing`, `Search`) and ends with
its result, so the same lines of code answer for files in memory and for a sandbox at the other end of a stream
(envd/server/toolrunner.py). What answers throws an OSError into the generator where the workspace says no.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from envd.tools.output import Output
from envd.tools.paths import relative
from envd.tools.schemas import check_arguments
from envd.tools.searching import HIDDEN, MAX_FILE_BYTES, BadPattern
from envd.tools.textfile import line_count, numbered, replace_line
from envd.types import ToolCall, ToolResult

__all__ = ["HIDDEN", "MAX_FILE_BYTES", "Listing", "Load", "Search", "Store", "ToolError", "tool_steps"]

MAX_ANSWER_BYTES = 64 * 1024
"""Of one answer, as JSON."""
MAX_ENTRIES = 100_000
"""Of one listing."""
_MAX_PATH = 4095
_REASONS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "not a directory",
    errno.EISDIR: "is a directory",
    errno.ENOSPC: "no space left for",
    errno.EFBIG: "no space left for",
    errno.EDQUOT: "no space left for",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "too many links",
    errno.EXDEV: "no such file",
    errno.ENAMETOOLONG: "name too long",
    errno.ENXIO: "not a regular file",
}


class ToolError(Exception):
    """A tool's own failure; its message is what the model reads."""


class Load(NamedTuple):
    """Wants a regular file's bytes, at most MAX_FILE_BYTES. Answered by them."""

    path: str


class Store(NamedTuple):
    """Wants a file's content replaced, in place. Answered by None."""

    path: str
    data: bytes
    create: bool
    """Also make the file and the directories above it."""


class Listing(NamedTuple):
    """Wants what is below a directory, without HIDDEN.

    Answered by (path, is a directory) pairs, sorted by bytes, parents first.
    """

    path: str
    depth: int


class Search(NamedTuple):
    """Wants the lines that match. Answered by an `Output`, empty where there are none."""

    pattern: str
    path: str


Need = Load | Store | Listing | Search
Steps = Generator[Need, Any, "str | Output"]


def tool_steps(call: ToolCall) -> Generator[Need, Any, ToolResult]:
    """The file tool as a generator. Bad calls and failures are results with `ok=False`; it raises nothing."""
    try:
        answer = yield from _run(call.name, call.arguments)
    except ToolError as error:
        return _result(False, str(error))
    return _result(True, answer)


def _result(ok: bool, answer: str | Output) -> ToolResult:
    if isinstance(answer, str):
        output = Output()
        output.feed(answer.encode("utf-8", "surrogateescape"))
    else:
        output = answer
    return ToolResult(ok, output.text(), output.true_bytes, output.truncated)


def _run(name: str, arguments: Mapping[str, Any]) -> Steps:
    wrong = check_arguments(name, arguments)
    if wrong:
        raise ToolError(wrong)
    if name not in _FILE_TOOLS:
        raise ToolError(f"error: {name} needs a sandbox")
    path = str(arguments.get("path", "."))
    try:
        os.fsencode(path)
        if len(path) > _MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        return (yield from _FILE_TOOLS[name](path, arguments))
    except OSError as error:
        raise tool_error(error, path) from error
    except UnicodeError as error:
        raise ToolError("error: text is not valid unicode") from error


def tool_error(error: OSError | ToolError, path: str) -> ToolError:
    """What a tool answers where the system said no."""
    if isinstance(error, ToolError):
        return error
    return ToolError(f"error: {_REASONS.get(error.errno or 0, os.strerror(error.errno or 0).lower())}: {path}")


def _read(path: str, arguments: Mapping[str, Any]) -> Steps:
    data = yield Load(path)
    lines = line_count(data)
    start = arguments.get("start", 1)
    end = min(arguments.get("end", lines), lines)
    if not lines and start == 1:
        return ""
    if start < 1 or start > end:
        raise ToolError(f"error: {path} has {lines} lines")
    return numbered(data, start, end)


def _write(path: str, arguments: Mapping[str, Any]) -> Steps:
    if relative(path) == ".":
        raise ToolError(f"error: is a directory: {path}")
    yield Store(path, arguments["content"].encode("utf-8", "surrogateescape"), True)
    return "ok"


def _edit(path: str, arguments: Mapping[str, Any]) -> Steps:
    data = yield Load(path)
    if "line" in arguments:
        lines = line_count(data)
        if not 1 <= arguments["line"] <= lines:
            raise ToolError(f"error: {path} has {lines} lines")
        data = replace_line(data, arguments["line"], _encoded(arguments["new"]))
    else:
        old = _encoded(arguments["old"]) if _is_unicode(arguments["old"]) else b""
        count = data.count(old) if old else 0
        if count != 1:
            raise ToolError(
                f"error: old occurs {count} times in {path}" if count else f"error: old not found in {path}"
            )
        data = data.replace(old, _encoded(arguments["new"]))
    yield Store(path, data, False)
    return "ok"


def _list(path: str, arguments: Mapping[str, Any]) -> Steps:
    found = yield Listing(path, min(max(arguments.get("depth", 2), 1), MAX_ENTRIES))
    if len(found) > MAX_ENTRIES:
        raise too_many(path)
    return "\n".join(name + "/" if is_dir else name for name, is_dir in found)


def _search(path: str, arguments: Mapping[str, Any]) -> Steps:
    os.fsencode(arguments["pattern"])
    try:
        found = yield Search(arguments["pattern"], relative(path))
    except BadPattern as error:
        raise ToolError(f"error: bad pattern: {error}") from error
    return found if found.true_bytes else "no matches"


def _submit_answer(path: str, arguments: Mapping[str, Any]) -> Steps:
    """Acknowledge an answer: the caller keeps its calls, so nothing in a sandbox has to."""
    yield from ()
    if len(json.dumps(arguments["answer"])) > MAX_ANSWER_BYTES:
        raise ToolError(f"error: an answer takes at most {MAX_ANSWER_BYTES} bytes of JSON")
    return "submitted"


_FILE_TOOLS: dict[str, Callable[[str, Mapping[str, Any]], Steps]] = {
    "read": _read,
    "write": _write,
    "edit": _edit,
    "list": _list,
    "search": _search,
    "submit_answer": _submit_answer,
}


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_unicode(text: str) -> bool:
    """A lone surrogate is in no file's text: what is not valid there reads as other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def too_large(path: str) -> ToolError:
    """The answer to a `Load` of more than MAX_FILE_BYTES."""
    return ToolError(f"error: larger than {MAX_FILE_BYTES} bytes: {path}")


def too_many(path: str) -> ToolError:
    """The answer to a `Listing` of more than MAX_ENTRIES."""
    return ToolError(f"error: more than {MAX_ENTRIES} entries: list a directory below {path}")
