"""Keep the answer from the agent: cut failing tests out of its files, find copies of the fixed code."""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path

from curation.tasks.factory.baseline import TestFunction
from curation.tasks.factory.functions import Function, Source
from curation.tasks.importing.trees import Tree

MOST_CONTAINED = 0.8
"""Largest share of a function's code that another file may hold."""
_WINDOW = 8
"""Tokens that are compared at once."""
_LEAST = 24
"""Tokens of a function below which a copy of most of it is chance."""
_DEFINITION = re.compile(rb"\bdef (\w+)\(")
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


@cache
def standard_library() -> Mapping[str, bytes]:
    """Sources of Python's standard library, with its tests, which every sandbox shows."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return {f"python/{path.relative_to(root)}": path.read_bytes() for path in paths}


class Copies:
    """Finds files, other than a function's own, that hold most of its code: of a short one, all of it and its name."""

    def __init__(self, tree: Tree, packages: Mapping[str, bytes]) -> None:
        """packages: sources beside the tree that an agent can read."""
        self._tree, self._packages = tree, packages
        self._of_packages: dict[str, frozenset[int]] = {}
        self._found: dict[str, str | None] = {}

    @cached_property
    def _windows(self) -> Mapping[str, frozenset[int]]:
        return {path: _windows(data) for path, data in self._tree.items() if b"\0" not in data[:1024]}

    @cached_property
    def _defining(self) -> Mapping[bytes, list[str]]:
        """Files of the packages by the names of the functions in them."""
        found: dict[bytes, list[str]] = {}
        for path, data in self._packages.items():
            for name in set(_DEFINITION.findall(data)):
                found.setdefault(name, []).append(path)
        return found

    def of(self, function: Function) -> str | None:
        """Path of a file with a copy, or None. The function's own file counts without the function."""
        if function.key not in self._found:
            self._found[function.key] = self._copy(function)
        return self._found[function.key]

    def _copy(self, function: Function) -> str | None:
        wanted = _windows(function.text.encode())
        defining = self._defining.get(function.node.name.encode(), [])
        if len(wanted) < _LEAST:
            others = {path: self._tree[path] for path in self._tree if path != function.source.path}
            others |= {path: self._packages[path] for path in defining}
            return next((path for path, data in others.items() if _holds_equal(path, data, function)), None)
        source = function.source
        rest = source.data[: source.starts[function.first - 1]] + source.data[source.starts[function.last] :]
        for path, found in self._windows.items():
            there = _windows(rest) if path == source.path else found
            if len(wanted & there) > MOST_CONTAINED * len(wanted):
                return path
        for path in defining:
            if path not in self._of_packages:
                self._of_packages[path] = _windows(self._packages[path])
            if len(wanted & self._of_packages[path]) > MOST_CONTAINED * len(wanted):
                return path
        return None


def _holds_equal(path: str, data: bytes, function: Function) -> bool:
    """Whether a file has a function of this qualified name with the same code but for its docstring."""
    *classes, name = function.qualname.encode().split(b".")
    if (
        not path.endswith(".py")
        or b"def %s(" % name not in data
        or not all(b"class " + each in data for each in classes)
    ):
        return False
    try:
        source = Source(path, data, ast.parse(data))
    except (SyntaxError, ValueError, RecursionError):
        return False
    same = (each for each in source.functions if each.qualname == function.qualname)
    return any(_code(each) == _code(function) for each in same)


def _code(function: Function) -> list[str]:
    return [ast.dump(each) for each in (function.node.args, *function.body)]


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
