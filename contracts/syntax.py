"""Parse Python source, from any thread."""

from __future__ import annotations

import ast
import threading

_ONE_AT_A_TIME = threading.Lock()
"""CPython before 3.11.8 and 3.12.2 shares the recursion depth between threads and then raises SystemError
(python/cpython#106905).
"""


def parse_python(source: str | bytes) -> ast.Module:
    """`ast.parse`, one call at a time, with its exceptions."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)
