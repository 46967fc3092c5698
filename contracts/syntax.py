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


def parse_python(source: str | bytes) -> ast.Module:
    """`ast.parse`, one call at a time, with its exceptions."""
    with _ONE_AT_A_TIME:
        for _ in range(_TRIES - 1):
            try:
                return ast.parse(source)
            except SystemError:
                continue
        return ast.parse(source)
