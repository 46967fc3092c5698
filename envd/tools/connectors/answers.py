"""What a connector answers, in constant memory, and the paths that it may open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

HALF = 8192
"""Bytes kept of the head and of the tail; `envd.tools.output` shows as much."""
Arguments = dict[str, Any]


class Refused(Exception):
    """A call that can't be answered; its message is what the model reads."""


class Answer:
    """Text of an answer."""

    def __init__(self, text: str = "", status: str = "ok") -> None:
        """status: ok, failed or late (timed out)."""
        self.status = status
        self.note = ""
        """Last line, which is never cut."""
        self._head, self._tail, self._size = bytearray(), bytearray(), 0
        self.feed(text.encode("utf-8", "replace"))

    def feed(self, data: bytes) -> None:
        """Add output."""
        self._size += len(data)
        room = max(HALF - len(self._head), 0)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-HALF:]

    def frame(self) -> bytes:
        """What the server reads: `status size head tail` in one line, the two parts, the note."""
        line = f"{self.status} {self._size} {len(self._head)} {len(self._tail)}\n".encode()
        return line + self._head + self._tail + self.note.encode("utf-8", "replace")


def answer(run: Callable[[Arguments], Answer], arguments: Arguments) -> Answer:
    """Answer of a connector, also if it fails."""
    try:
        return run(arguments)
    except Refused as error:
        return Answer(f"error: {error}", "failed")
    except OSError as error:
        where = f": {os.path.relpath(error.filename)}" if isinstance(error.filename, str) else ""
        return Answer(f"error: {(error.strerror or str(error)).lower()}{where}", "failed")
    except (ValueError, MemoryError, RecursionError) as error:
        return Answer(f"error: {str(error) or type(error).__name__}", "failed")


def inside(path: str) -> Path:
    """Absolute path in the workspace, which is the current directory. Raises Refused for a path or link out of it."""
    root = Path.cwd()
    relative = path[len(str(root)) :] if f"{path}/".startswith(f"{root}/") else path
    real = Path(root, relative.lstrip("/")).resolve()
    if real != root and root not in real.parents:
        raise Refused(f"outside the workspace: {path}")
    return real


def kept(name: str) -> Path:
    """Path of a file of the sandbox, outside the workspace, that outlives a call."""
    return Path(os.environ.get("TMPDIR", "/tmp"), f".triplane-{name}")
