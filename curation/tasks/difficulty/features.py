"""Static features of a task: the size of its fix and of its tests, and how it was made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.syntax import parse_python
from contracts.tasks import Task

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NOWHERE = "/dev/null"
_Change = tuple[str, int]
"""Path and line, in the agent's file, of a removed line, or of the line after which one is added."""


@dataclass(frozen=True)
class Features:
    """Facts about a task that need no run."""

    files: int
    """Files that the fix changes."""
    functions: int | None
    """Functions of the agent's files that the fix changes; None if one of the files is not Python that parses."""
    changed_lines: int
    """Lines that the fix adds and removes."""
    tests: int
    """Tests that must pass."""
    fail_to_pass: int | None
    """Tests that fail before the fix; None if the task does not name them."""
    strategy: str | None
    operator: str | None
    """strategy and operator: how `triplane tasks make` made the bug; None for other tasks."""


def features_of(task: Task) -> Features:
    """Static features of a task."""
    changes = list(_changes(task.reference_diff.decode(errors="replace")))
    failing = task.meta.get("fail_to_pass") or None
    return Features(
        files=len({path for path, _ in changes}),
        functions=_functions(task, changes),
        changed_lines=len(changes),
        tests=len(task.tests),
        fail_to_pass=len(failing) if failing else None,
        strategy=task.meta.get("strategy"),
        operator=task.meta.get("operator"),
    )


def _changes(diff: str) -> Iterator[_Change]:
    """Every added and removed line of a unified diff."""
    path, line, before, after = "", 0, 0, 0
    for text in diff.split("\n"):
        hunk = _HUNK.match(text)
        if before <= 0 and after <= 0:
            if hunk:
                line, before, after = int(hunk[1]), int(hunk[2] or 1), int(hunk[3] or 1)
                line += not before  # git names the line before a place without lines
            elif text.startswith(("--- ", "+++ ")) and not text.startswith(_NOWHERE, 4):
                path = text[6:].split("\t")[0]
        elif text.startswith("-"):
            yield path, line
            line, before = line + 1, before - 1
        elif text.startswith("+"):
            yield path, line - 1
            after -= 1
        elif not text.startswith("\\"):
            line, before, after = line + 1, before - 1, after - 1


def _functions(task: Task, changes: list[_Change]) -> int | None:
    found: set[tuple[str, int]] = set()
    for path in {path for path, _ in changes} & task.files.keys():
        try:
            tree = parse_python(task.files[path].decode())
        except (SyntaxError, ValueError):
            return None
        defined = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for _, line in (change for change in changes if change[0] == path):
            around = [node for node in defined if node.lineno <= line <= (node.end_lineno or node.lineno)]
            if around:
                found.add((path, max(node.lineno for node in around)))
    return len(found)
