"""Search by regular expression, in plain Python: the `search` tool's definition.

Needs the standard library only: sandboxes without ripgrep run this very file, as a process that can be killed. Links
below the start are not followed. A file that holds a null character near its beginning is no text and is left out, as
is one above MAX_FILE_BYTES.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Callable, Iterator

HIDDEN = frozenset({".git", "__pycache__", ".pytest_cache"})
"""Names that list, search and diffs leave out."""
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_DEPTH = 64
"""Directories below the start that are searched."""
MAX_PATTERN = 64 * 1024
_PROBE = 8192
_MAX_LINKS = 40
_KEEP = 16 * 1024


class BadPattern(ValueError):
    """The pattern is no regular expression."""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raise BadPattern with the reason, as one line."""
    if len(pattern) > MAX_PATTERN:
        raise BadPattern("too complex")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadPattern(getattr(error, "msg", "too complex")) from error


def matches(fd: int, path: str, pattern: re.Pattern[str]) -> Iterator[bytes]:
    """`path:line: text` of each line below an open directory, or of an open file, that matches. Closes fd."""
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        yield from _in_file(fd, path, pattern)
        return
    pending = [(fd, "" if path == "." else path + "/", _names(fd))]
    try:
        while pending:
            fd, prefix, names = pending[-1]
            name = next(names, None)
            if name is None:
                os.close(pending.pop()[0])
                continue
            try:
                inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
            except OSError:
                continue  # a link, a socket, locked, or removed meanwhile
            if not stat.S_ISDIR(os.fstat(inner).st_mode):
                yield from _in_file(inner, prefix + name, pattern)
            elif len(pending) < MAX_DEPTH:
                pending.append((inner, prefix + name + "/", _names(inner)))
            else:
                os.close(inner)
    finally:
        for fd, _, _ in pending:
            os.close(fd)


def _names(fd: int) -> Iterator[str]:
    try:
        found = os.listdir(fd)
    except OSError:
        found = []
    return iter(sorted((name for name in found if name not in HIDDEN), key=os.fsencode))


def _in_file(fd: int, path: str, pattern: re.Pattern[str]) -> Iterator[bytes]:
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_FILE_BYTES:
            return
        probe = file.read(4 * _PROBE)
        if "\0" in probe.decode("utf-8", "surrogateescape")[:_PROBE]:
            return
        file.seek(0)
        name = os.fsencode(path)
        for number, line in enumerate(file, 1):
            line = line.removesuffix(b"\n")
            if pattern.search(line.decode("utf-8", "surrogateescape")):
                yield b"%b:%d: %b" % (name, number, line)


def open_below(root: str, path: str) -> int:
    """Open a path whose links are taken from `root`, as the server's own look at it does. Raises OSError."""
    todo = [part for part in path.split("/") if part not in ("", ".")][::-1]
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = done[:-1]
            continue
        here = "/".join([root, *done, part])
        if not stat.S_ISLNK(os.lstat(here).st_mode):
            done.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(40, "too many links", path)
        target = os.readlink(here)  # noqa: PTH115 - pathlib costs half this process's start
        done = [] if target.startswith("/") else done
        todo += [piece for piece in target.split("/") if piece not in ("", ".")][::-1]
    return os.open("/".join([root, *done]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def main(arguments: list[str], write: Callable[[bytes], object]) -> None:
    """Search `path` for `pattern` from the working directory: a line with the true size and the head's, then head and
    tail.
    """
    pattern, path = arguments
    head, tail, size = bytearray(), bytearray(), 0
    try:
        compiled = compile_pattern(pattern)
        for line in matches(open_below(".", path), path, compiled):
            line = b"\n" + line if size else line
            size += len(line)
            room = _KEEP - len(head)
            head += line[:room]
            tail += line[max(room, 0) :][-_KEEP:]
            if len(tail) > 64 * _KEEP:
                del tail[:-_KEEP]
    except BadPattern as error:
        write(b"bad %b" % str(error).encode("utf-8", "surrogateescape"))
    except OSError as error:
        write(b"errno %d" % (error.errno or 5))
    else:
        write(b"%d %d\n" % (size, len(head)) + head + tail[-_KEEP:])


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdout.buffer.write)
