"""The file tools on a local directory: what a sandbox must answer, byte for byte."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envd.tools import Output, relative
from envd.tools.files import (
    HIDDEN,
    MAX_FILE_BYTES,
    Listing,
    Load,
    Need,
    Store,
    ToolError,
    too_large,
    tool_steps,
)
from envd.tools.paths import make_parents, open_in_root
from envd.tools.searching import compile_pattern, matches
from envd.types import ToolCall, ToolResult


def run_file_tool(root: Path, call: ToolCall) -> ToolResult:
    """Run one file tool on the workspace `root`. Bad calls and failures answer `ok=False`; nothing is raised."""
    steps = tool_steps(call)
    try:
        need = next(steps)
        while True:
            try:
                answer = _answer(root, need)
            except (OSError, ToolError, ValueError) as error:
                need = steps.throw(error)
            else:
                need = steps.send(answer)
    except StopIteration as end:
        result: ToolResult = end.value
        return result


def _answer(root: Path, need: Need) -> Any:
    """What a local directory has to say."""
    if isinstance(need, Load):
        return _load(root, need.path)
    if isinstance(need, Store):
        return _store(root, need)
    if isinstance(need, Listing):
        fd = open_in_root(root, need.path, os.O_RDONLY | os.O_DIRECTORY)
        prefix = relative(need.path)
        return list(_walk(fd, "" if prefix == "." else prefix, need.depth))
    output = Output()
    pattern = compile_pattern(need.pattern)
    fd = open_in_root(root, need.path, os.O_RDONLY | os.O_NONBLOCK)
    for line in matches(fd, need.path, pattern):
        output.feed(b"\n" + line if output.true_bytes else line)
    return output


def _walk(fd: int, prefix: str, depth: int) -> Iterator[tuple[str, bool]]:
    """Yield (path, is directory), sorted, parents before children; links are never followed, what is locked stays
    closed. Closes fd.
    """
    pending = [(fd, prefix, _sorted(fd))]
    try:
        while pending:
            fd, prefix, names = pending[-1]
            name, is_dir = next(names, (None, False))
            if name is None:
                os.close(pending.pop()[0])
                continue
            path = f"{prefix}/{name}" if prefix else name
            yield path, is_dir
            if not is_dir or len(pending) == depth:
                continue
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                inner = os.open(name, flags, dir_fd=fd)
            except OSError:
                continue
            pending.append((inner, path, _sorted(inner)))
    finally:
        for fd, _, _ in pending:
            os.close(fd)


def _sorted(fd: int) -> Iterator[tuple[str | None, bool]]:
    with os.scandir(fd) as entries:
        found = sorted((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)
    return iter([(os.fsdecode(name), is_dir) for name, is_dir in found if os.fsdecode(name) not in HIDDEN])


def _load(root: Path, path: str) -> bytes:
    fd = open_in_root(root, path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        if about.st_size > MAX_FILE_BYTES:
            raise too_large(path)
        return file.read()


def _store(root: Path, need: Store) -> None:
    if need.create:
        make_parents(root, need.path)
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | (os.O_CREAT if need.create else 0)
    with os.fdopen(open_in_root(root, need.path, flags), "wb", buffering=0) as file:
        view = memoryview(need.data)
        while view:
            view = view[file.write(view) or 0 :]
