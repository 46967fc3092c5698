"""The file tools: read, write, edit, list, search."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envd.tools.output import Output
from envd.tools.paths import make_parents, open_in_root, relative
from envd.tools.schemas import check_arguments
from envd.types import ToolCall, ToolResult

HIDDEN = frozenset({".git", "__pycache__", ".pytest_cache"})
"""Names that list, search and diffs leave out."""
MAX_FILE_BYTES = 32 * 1024 * 1024
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


def run_file_tool(root: Path, call: ToolCall) -> ToolResult:
    """Run one file tool on the workspace `root`. Bad calls and failures answer `ok=False`; nothing is raised."""
    output = Output()
    ok = True
    try:
        output.feed(_run(root, call.name, call.arguments).encode("utf-8", "surrogateescape"))
    except ToolError as error:
        ok = False
        output.feed(str(error).encode("utf-8", "surrogateescape"))
    return ToolResult(ok, output.text(), output.true_bytes, output.truncated)


def _run(root: Path, name: str, arguments: Mapping[str, Any]) -> str:
    wrong = check_arguments(name, arguments)
    if wrong:
        raise ToolError(wrong)
    if name not in _FILE_TOOLS:
        raise ToolError(f"error: {name} needs a sandbox")
    path = str(arguments.get("path", "."))
    try:
        return _FILE_TOOLS[name](root, arguments)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, os.strerror(error.errno or 0).lower())
        raise ToolError(f"error: {reason}: {path}") from error
    except UnicodeError as error:
        raise ToolError("error: text is not valid unicode") from error


def _read(root: Path, arguments: Mapping[str, Any]) -> str:
    lines = _lines(_load(root, arguments["path"]))
    start = arguments.get("start", 1)
    end = min(arguments.get("end", len(lines)), len(lines))
    if not lines and start == 1:
        return ""
    if start < 1 or start > end:
        raise ToolError(f"error: {arguments['path']} has {len(lines)} lines")
    return "\n".join(f"{number} {lines[number - 1]}" for number in range(start, end + 1))


def _write(root: Path, arguments: Mapping[str, Any]) -> str:
    if relative(arguments["path"]) == ".":
        raise ToolError(f"error: is a directory: {arguments['path']}")
    make_parents(root, arguments["path"])
    _store(root, arguments["path"], arguments["content"], os.O_CREAT)
    return "ok"


def _edit(root: Path, arguments: Mapping[str, Any]) -> str:
    path, new = arguments["path"], arguments["new"]
    text = _load(root, path)
    if "line" in arguments:
        lines = _lines(text)
        number = arguments["line"]
        if not 1 <= number <= len(lines):
            raise ToolError(f"error: {path} has {len(lines)} lines")
        lines[number - 1] = new.removesuffix("\n")
        text = "\n".join(lines) + ("\n" if text.endswith("\n") else "")
    else:
        count = text.count(arguments["old"]) if arguments["old"] else 0
        if count != 1:
            raise ToolError(
                f"error: old occurs {count} times in {path}" if count else f"error: old not found in {path}"
            )
        text = text.replace(arguments["old"], new)
    _store(root, path, text, 0)
    return "ok"


def _list(root: Path, arguments: Mapping[str, Any]) -> str:
    depth = arguments.get("depth", 2)
    fd = open_in_root(root, arguments.get("path", "."), os.O_RDONLY | os.O_DIRECTORY)
    prefix = relative(arguments.get("path", "."))
    return "\n".join(
        name + ("/" if is_dir else "") for name, is_dir in _walk(fd, "" if prefix == "." else prefix, depth)
    )


def _search(root: Path, arguments: Mapping[str, Any]) -> str:
    try:
        pattern = re.compile(arguments["pattern"])
    except (re.error, RecursionError, OverflowError) as error:
        raise ToolError(f"error: bad pattern: {getattr(error, 'msg', 'too complex')}") from error
    path = relative(arguments.get("path", "."))
    fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        names = [name for name, is_dir in _walk(fd, "" if path == "." else path, 64) if not is_dir]
    else:
        os.close(fd)
        names = [path]
    return "\n".join(_matches(root, names, pattern)) or "no matches"


def _matches(root: Path, names: list[str], pattern: re.Pattern[str]) -> Iterator[str]:
    for name in names:
        try:
            text = _load(root, name)
        except (OSError, ToolError):
            continue  # a dangling link, a socket, or a file that was removed meanwhile
        if "\0" in text[:8192]:
            continue
        for number, line in enumerate(_lines(text), 1):
            if pattern.search(line):
                yield f"{name}:{number}: {line}"


def _walk(fd: int, prefix: str, depth: int) -> Iterator[tuple[str, bool]]:
    """Yield (path, is directory), sorted, parents before children; links are never followed. Closes fd."""
    try:
        with os.scandir(fd) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for name, is_dir in found:
            if name in HIDDEN:
                continue
            path = f"{prefix}/{name}" if prefix else name
            yield path, is_dir
            if is_dir and depth > 1:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                yield from _walk(os.open(name, flags, dir_fd=fd), path, depth - 1)
    finally:
        os.close(fd)


def _load(root: Path, path: str) -> str:
    fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if stat.S_ISDIR(about.st_mode):
            raise ToolError(f"error: is a directory: {path}")
        if not stat.S_ISREG(about.st_mode):
            raise ToolError(f"error: not a regular file: {path}")
        if about.st_size > MAX_FILE_BYTES:
            raise ToolError(f"error: larger than {MAX_FILE_BYTES} bytes: {path}")
        return file.read().decode("utf-8", "surrogateescape")


def _store(root: Path, path: str, text: str, flags: int) -> None:
    data = text.encode("utf-8", "surrogateescape")
    fd = open_in_root(root, path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | flags)
    with os.fdopen(fd, "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) or 0 :]


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


_FILE_TOOLS: dict[str, Callable[[Path, Mapping[str, Any]], str]] = {
    "read": _read,
    "write": _write,
    "edit": _edit,
    "list": _list,
    "search": _search,
}
