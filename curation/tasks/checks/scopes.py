"""Resolve names and paths of a test file without running it."""

from __future__ import annotations

import ast
import builtins
import posixpath
import re
from collections import Counter
from collections.abc import Collection
from pathlib import PurePosixPath

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PATCHES = ("setattr", "delattr", "object", "multiple")
"""Functions of pytest and unittest.mock that replace attributes of their first argument."""
_DOTTED = re.compile(r"\b\w+\.(?=\w)")
_KEEP = frozenset({"pathlib.Path", "os.path.abspath", "os.path.realpath", "os.fspath", "builtins.str"})
"""Functions that return the path they are called with."""


class Scopes:
    """What the names of a test file mean. A name that may have several meanings has none here."""

    def __init__(self, tree: ast.Module, path: str = "") -> None:
        """path: of the file, relative to the workspace."""
        self._path = PurePosixPath(path)
        self._bound = _bindings(tree)
        self._patched: set[str] = set()
        self._imports = {} if "*" in self._bound else self._imported(tree)
        self._assigned = assignments(tree.body)
        self._everywhere = assignments(list(ast.walk(tree)))
        self._functions: dict[int, tuple[Counter[str], dict[str, list[ast.expr]]]] = {}

    def origin(self, node: ast.expr) -> str:
        """Dotted name of a builtin or of what is imported, such as `math.sqrt`; empty for anything else, or if the file
        may replace it.
        """
        if isinstance(node, ast.Attribute):
            above = self.origin(node.value)
            return f"{above}.{node.attr}" if above else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self._bound or "*" in self._bound:
            return self._imports.get(node.id, "")
        known = hasattr(builtins, node.id) and self._patched.isdisjoint(("builtins", "builtins."))
        return f"builtins.{node.id}" if known else ""

    def assigned(self, name: str, function: Function | None) -> tuple[ast.expr, Function | None] | None:
        """The only value of a name that a function reads, and the function that assigns it; None if unknown.

        function: None for code outside of functions.
        """
        if function is not None:
            bound, values = self._of(function)
            if name in bound:
                return (values[name][0], function) if bound[name] == 1 and name in values else None
        if self._bound[name] == 1 and name in self._assigned and "*" not in self._bound:
            return self._assigned[name][0], None
        return None

    def everywhere(self, name: str) -> list[ast.expr]:
        """All values that the file gives a name, wherever; empty if it may have others."""
        given = self._everywhere.get(name, [])
        return given if len(given) == self._bound[name] and "*" not in self._bound else []

    def context(self, name: str, function: Function) -> ast.expr | None:
        """The context manager of the `with` statement that gives a function the name, which it reads once."""
        found = [
            item.context_expr
            for node in ast.walk(function)
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == name
        ]
        return found[0] if found and self._of(function)[0][name] == reads(function, name) == 1 else None

    def _of(self, function: Function) -> tuple[Counter[str], dict[str, list[ast.expr]]]:
        """Bindings and assignments of a function."""
        if id(function) not in self._functions:
            self._functions[id(function)] = _bindings(function), assignments(list(ast.walk(function)))
        return self._functions[id(function)]

    def place(self, node: ast.expr, function: Function | None) -> str | None:
        """Path, relative to the workspace, of an expression that is made of `__file__`; None for others."""
        try:
            found = self._place(node, function)
        except RecursionError:
            return None
        text = posixpath.normpath(found) if found is not None else ".."
        return None if text == ".." or text.startswith(("/", "../")) else text

    def _place(self, node: ast.expr, function: Function | None) -> PurePosixPath | None:
        match node:
            case ast.Name(id="__file__"):
                return self._path if "__file__" not in self._bound else None
            case ast.Name(id=name):
                found = self.assigned(name, function)
                return self._place(*found) if found else None
            case ast.Attribute(value=inner, attr="parent"):
                return self._above(inner, function, 1)
            case ast.Subscript(value=ast.Attribute(value=inner, attr="parents"), slice=ast.Constant(value=int(levels))):
                return self._above(inner, function, levels + 1)
            case ast.BinOp(left=inner, op=ast.Div(), right=part):
                return _joined(self._place(inner, function), [part])
            case ast.Call(func=ast.Attribute(value=inner, attr="resolve" | "absolute"), args=[], keywords=[]):
                return self._place(inner, function)
            case ast.Call(func=ast.Attribute(value=inner, attr="joinpath"), args=parts, keywords=[]):
                return _joined(self._place(inner, function), parts)
            case ast.Call(func=ast.Attribute(value=inner, attr="with_name"), args=[part], keywords=[]):
                return _joined(self._above(inner, function, 1), [part])
            case ast.Call(func=called, args=[inner, *parts], keywords=[]):
                name = self.origin(called)
                if name == "os.path.dirname" and not parts:
                    return self._above(inner, function, 1)
                if name == "os.path.join" or (name in _KEEP and not parts):
                    return _joined(self._place(inner, function), parts)
        return None

    def _above(self, node: ast.expr, function: Function | None, levels: int) -> PurePosixPath | None:
        found = self._place(node, function)
        if found is None or not 0 < levels <= len(found.parts) or ".." in found.parts:
            return None
        return PurePosixPath(*found.parts[:-levels])

    def _imported(self, tree: ast.Module) -> dict[str, str]:
        """Origins of the names that only one import at the top of the file binds, and that nothing in it patches."""
        modules: dict[str, str] = {}
        others: dict[str, str] = {}
        for node in tree.body:
            if isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.split(".")[0]
                    modules[each.asname or top] = each.name if each.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                others |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        self._patched = _patched(tree, modules)
        return {
            name: origin
            for name, origin in (modules | others).items()
            if self._bound[name] == 1 and self._patched.isdisjoint((name, f"{origin.split('.')[0]}."))
        }


def _joined(place: PurePosixPath | None, parts: list[ast.expr]) -> PurePosixPath | None:
    """A path with literal parts below it."""
    for part in parts:
        if place is None or not (isinstance(part, ast.Constant) and isinstance(part.value, str)):
            return None
        place /= part.value
    return place


def _bindings(scope: ast.AST) -> Counter[str]:
    """How often each name is bound anywhere in a scope and below; `*` for an import of all names."""
    found: Counter[str] = Counter()
    for node in ast.walk(scope):
        match node:
            case (
                ast.Name(id=str(name), ctx=ast.Store() | ast.Del())
                | ast.arg(arg=str(name))
                | ast.FunctionDef(name=str(name))
                | ast.AsyncFunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                found[name] += 1
            case ast.alias(name=name, asname=other):
                found[other or name.split(".")[0]] += 1
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found.update(names)
    return found


def assignments(nodes: list[ast.AST] | list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Values of the names that statements assign alone."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _patched(tree: ast.Module, modules: Collection[str]) -> set[str]:
    """Names that the file may use to replace what they name, and `math.` for a module that it may patch otherwise."""
    found: set[str] = set()
    read: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) if name in modules:
                read[name] += 1
            case ast.Attribute(value=inner, attr=name):
                found.add(f"{name}.")
                if isinstance(inner, ast.Name) and isinstance(node.ctx, ast.Load):
                    read[inner.id] -= 1
            case ast.Constant(value=str(text)):
                found.update(_DOTTED.findall(text))
            case ast.Call(func=called, args=[ast.Name(id=name), *_]) if last(called) in _PATCHES:
                found.add(name)
    return found | {name for name in modules if read[name]}


def last(node: ast.expr) -> str:
    """Last part of a dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def reads(scope: ast.AST, name: str) -> int:
    """How often a scope reads a name."""
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in ast.walk(scope)
    )
