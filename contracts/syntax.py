"""Parse Python source, from any thread."""

from __future__ import annotations

import ast
import threading

_ONE_AT_A_TIME = threading.Lock()
"""CPython before 3.11.8 and 3.12.2 shares the recursion depth between threads and then raises SystemError
(python/cpython#106905).
"""
_TRIES = 5
"""A library may parse in another thread without this lock, so one call can still meet that error."""


_MOST_LEVELS = 200
"""`ast.dump` takes up to three frames a level, of the thousand that Python allows."""


def parse_python(source: str | bytes) -> ast.Module:
    """`ast.parse`, one call at a time. Raises SyntaxError, also for source that is nested too deeply, or ValueError."""
    try:
        with _ONE_AT_A_TIME:
            for _ in range(_TRIES - 1):
                try:
                    return ast.parse(source)
                except SystemError:
                    continue
            return ast.parse(source)
    except (RecursionError, MemoryError):
        raise SyntaxError("nested too deeply") from None


def has_lone_return(source: bytes) -> bool:
    """Whether a carriage return alone ends a line: `ast` counts such lines, code that splits at newlines does not."""
    return b"\r" in source.replace(b"\r\n", b"\n")


def is_deep(node: ast.AST, levels: int = _MOST_LEVELS) -> bool:
    """Whether a tree has more levels than recursive code such as `ast.dump` and visitors can take."""
    level = [node]
    for _ in range(levels):
        level = [child for each in level for child in ast.iter_child_nodes(each)]
        if not level:
            return False
    return True
