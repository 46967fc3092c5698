"""Keep the answer from the agent: cut failing tests out of its files, find copies of the fixed code."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from functools import cached_property

from curation.tasks.factory.baseline import TestFunction
from curation.tasks.factory.functions import Function
from curation.tasks.importing.trees import Tree

MOST_CONTAINED = 0.8
"""Largest share of a function's code that another file may hold."""
_WINDOW = 8
"""Tokens that are compared at once."""
_LEAST = 24
"""Tokens of a function below which copies of it are chance."""
_LAYOUT = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


def without_tests(tree: Tree, tests: Iterable[TestFunction]) -> Tree | str:
    """`tree` without the definitions of these tests, or the reason why they can't be cut out."""
    lines: dict[str, set[int]] = {}
    for test in tests:
        if test.path not in tree:
            return "a failing test has no place in the repository"
        lines.setdefault(test.path, set()).add(test.line)
    cut = dict(tree)
    for path, starts in lines.items():
        changed = _cut(tree[path], starts)
        if changed is None:
            return "a failing test can't be cut out of its file"
        cut[path] = changed
    return cut


def _cut(data: bytes, starts: set[int]) -> bytes | None:
    """A test file without the functions that begin at these lines (of the definition or of a decorator)."""
    try:
        module = ast.parse(data)
    except (SyntaxError, ValueError):
        return None
    lines: list[bytes | None] = list(data.split(b"\n"))
    left = set(starts)
    for parent in ast.walk(module):
        body = getattr(parent, "body", None)
        if not isinstance(body, list) or isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        gone = 0
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if left & set(range(first, node.body[0].lineno + 1)) or starts & set(range(first, node.lineno + 1)):
                left -= set(range(first, node.body[0].lineno + 1))
                gone += 1
                lines[first - 1 : node.end_lineno] = [None] * ((node.end_lineno or first) - first + 1)
                if gone == len(body):
                    lines[first - 1] = b" " * node.col_offset + b"pass"
    if left:
        return None
    changed = b"\n".join(line for line in lines if line is not None)
    try:
        ast.parse(changed)
    except (SyntaxError, ValueError):
        return None
    return changed


class Copies:
    """Finds files, other than a function's own, that hold most of its code."""

    def __init__(self, tree: Tree, packages: Mapping[str, bytes]) -> None:
        """packages: sources beside the tree that an agent can read."""
        self._tree, self._packages = tree, packages
        self._of_packages: dict[str, frozenset[int]] = {}
        self._found: dict[str, str | None] = {}

    @cached_property
    def _windows(self) -> Mapping[str, frozenset[int]]:
        return {path: _windows(data) for path, data in self._tree.items() if b"\0" not in data[:1024]}

    def of(self, function: Function) -> str | None:
        """Path of a file with a copy, or None. The function's own file counts without the function."""
        if function.key not in self._found:
            self._found[function.key] = self._copy(function)
        return self._found[function.key]

    def _copy(self, function: Function) -> str | None:
        wanted = _windows(function.text.encode())
        if len(wanted) < _LEAST:
            return None
        source = function.source
        rest = source.data[: source.starts[function.first - 1]] + source.data[source.starts[function.last] :]
        for path, found in self._windows.items():
            there = _windows(rest) if path == source.path else found
            if len(wanted & there) > MOST_CONTAINED * len(wanted):
                return path
        definition = f"def {function.qualname.rpartition('.')[2]}(".encode()
        for path, data in self._packages.items():
            if definition not in data:
                continue
            if path not in self._of_packages:
                self._of_packages[path] = _windows(data)
            if len(wanted & self._of_packages[path]) > MOST_CONTAINED * len(wanted):
                return path
        return None


def _windows(data: bytes) -> frozenset[int]:
    """Hashes of all runs of _WINDOW tokens; of words, where the text is not Python."""
    words: list[str] = []
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            if token.type not in _LAYOUT and token.type != tokenize.ENCODING and token.string:
                words.append(token.string)
    except (SyntaxError, tokenize.TokenError, UnicodeDecodeError, ValueError):
        pass  # the tokens up to here count: a fragment, or another language
    return frozenset(hash(tuple(words[start : start + _WINDOW])) for start in range(len(words) - _WINDOW + 1))
