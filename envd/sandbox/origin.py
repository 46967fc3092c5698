"""Origin of code: the task, the system, or the final state under test."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from envd.sandbox.python_inside import system_directories


class Origin:
    """Distinguishes code of the final state from code of the task and of the system.

    Relies on attributes of objects, which malicious code can falsify: this detects ordinary cheats and prevents none.
    """

    def __init__(self, root: Path, template: Path, hidden: Collection[str]) -> None:
        self._root, self.template, self.hidden = root, template, frozenset(hidden)
        self._system = tuple({f"{path}/" for path in system_directories()})

    def vouched(self, found: Any) -> bool:
        """Whether a function, class, module or object is the task's own."""
        path = _file_of(found)
        return path is not None and self._is_tasks(path)

    def systems(self, found: Any) -> bool:
        """Whether a function, class, module or object belongs to Python or an installed package."""
        path = _file_of(found)
        return path is None if _is_builtin(found) else path is not None and self._is_systems(path)

    def _is_systems(self, path: str) -> bool:
        return path.startswith(self._system) and not path.startswith(f"{self._root}/")

    def _is_tasks(self, path: str) -> bool:
        if not path.startswith(f"{self._root}/"):
            return False
        relative = os.path.relpath(path, self._root)
        if relative in self.hidden:
            return True
        try:
            return (self.template / relative).read_bytes() == Path(path).read_bytes()
        except OSError:
            return False


def _is_builtin(found: Any) -> bool:
    kind = found if isinstance(found, type) else type(found)
    return getattr(kind, "__module__", "") == "builtins" and getattr(found, "__code__", None) is None


def _file_of(found: Any) -> str | None:
    found = getattr(found, "__func__", found)
    code = getattr(found, "__code__", None)
    if code is not None:
        return str(code.co_filename)
    if isinstance(getattr(found, "__file__", None), str):
        return str(found.__file__)
    kind = found if isinstance(found, type) else type(found)
    module = sys.modules.get(getattr(kind, "__module__", ""))
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) else None
