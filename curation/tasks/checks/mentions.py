"""Find the hidden files that test files may still read or list. What is unclear counts as reading."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from contracts.syntax import parse_python
from curation.tasks.checks.scopes import Function, Scopes

_LISTING = re.compile(
    "copytree|cwd|fwalk|getcwd|glob|iglob|iterdir|listdir|rglob|scandir|walk|(lazy_|original_|shared_)?datadir"
)
"""Functions and fixtures that find files by their directory."""
_HELPER = re.compile(r"(^|/)(conftest\.py|(tests?|testing)/(.*/)?(?!test_)[^/]*(?<!_test)\.py)$")
"""Paths of files by which tests may read others."""
_PLACEHOLDER = re.compile(r"[*?}\]]|%\w")


def candidates(data: Mapping[str, bytes], repository: Mapping[str, bytes]) -> dict[str, bytes]:
    """The hidden files in `data` that may be expectations: neither another of them names them, nor a helper of tests
    in the repository may read them.
    """
    helpers = {path: content for path, content in repository.items() if _HELPER.search(path)}
    names = {path: PurePosixPath(path).name.encode() for path in data}
    used = mentioned(helpers, data) | {
        path for path, name in names.items() if any(name in content for other, content in data.items() if other != path)
    }
    return {path: content for path, content in data.items() if path not in used}


def mentioned(files: Mapping[str, bytes], data: Collection[str]) -> set[str]:
    """Paths in `data` that the Python files may read, by any part of their names or by their directories."""
    try:
        trees = {path: parse_python(content) for path, content in files.items() if path.endswith(".py")} if data else {}
        return _in_files(trees, data)
    except (SyntaxError, ValueError, RecursionError):
        return set(data)


def _in_files(trees: Mapping[str, ast.Module], data: Collection[str]) -> set[str]:
    shared = {
        each.attr if isinstance(each, ast.Attribute) else each.name
        for tree in trees.values()
        for each in ast.walk(tree)
        if isinstance(each, (ast.Attribute, ast.alias))
    }
    return {found for path, tree in trees.items() for found in _in_file(tree, path, data, shared)}


def _in_file(tree: ast.Module, path: str, data: Collection[str], shared: Collection[str]) -> set[str]:
    """shared: attributes and imported names, which may be another file's names of paths."""
    scopes, found, texts = Scopes(tree, path), set[str](), set[str]()
    left: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while left:
        node, function = left.pop()
        if isinstance(node, ast.expr) and (place := scopes.place(node, function)) is not None:
            # the test's own path leads to its directory
            above = PurePosixPath(place).parent if place == path else PurePosixPath(place)
            found |= {each for each in data if PurePosixPath(each).is_relative_to(above)}
        elif _speaks_of_files(node):
            return set(data)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            texts.add(node.value if isinstance(node.value, str) else node.value.decode("latin-1"))
        elif not _harmless(node, function, scopes, shared):
            scope, body = (node, node.body) if isinstance(node, Function) else (function, [])
            left += [(each, scope if each in body else function) for each in ast.iter_child_nodes(node)]
    return found | _named(data, texts)


def _speaks_of_files(node: ast.AST) -> bool:
    """Whether it lists a directory."""
    names = (getattr(node, field, None) for field in ("id", "attr", "arg", "name"))
    return any(isinstance(each, str) and _LISTING.fullmatch(each) for each in names)


def _named(data: Collection[str], texts: Collection[str]) -> set[str]:
    """Files of which a text may be, or become, the name, or that of a directory above."""
    tails = tuple({tail for text in texts if "." in (tail := _PLACEHOLDER.split(text)[-1])})
    folders, every, found = {text.strip("./") for text in texts} - {""}, "\n".join(texts), set[str]()
    for path in map(PurePosixPath, data):
        above = {name for each in path.parents for name in (str(each), each.name)}
        if path.name in every or path.name.endswith(tails) or not above.isdisjoint(folders):
            found.add(str(path))
    return found


def _harmless(node: ast.AST, function: Function | None, scopes: Scopes, shared: Collection[str]) -> bool:
    """Whether a statement reads no file: a docstring, a change of the import path, or a name for a path, which counts
    where it is read.
    """
    if isinstance(node, ast.Expr):
        call = node.value
        inserts = isinstance(call, ast.Call) and scopes.origin(call.func) in ("sys.path.insert", "sys.path.append")
        return inserts or isinstance(call, ast.Constant)
    if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
        known = scopes.assigned(target.id, function)
        named = known is not None and known[0] is node.value and (function is not None or target.id not in shared)
        return named and scopes.place(node.value, function) is not None
    return False
