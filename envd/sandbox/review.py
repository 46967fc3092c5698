"""Reads the Python that a diff brought, without running it, and names what solutions of a task rarely need and cheats do."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

_MODULES = frozenset(
    {"_pytest", "pytest", "pluggy", "gc", "ctypes", "inspect", "linecache", "dis", "_ctypes", "_testcapi", "mmap", "atexit", "signal"}
)  # fmt: skip
_NAMES = frozenset(
    {
        "_getframe", "_current_frames", "currentframe", "f_back", "f_locals", "f_globals", "f_code", "tb_frame", "co_consts", "gi_frame", "settrace",
        "setprofile", "addaudithook", "get_objects", "get_referrers", "meta_path", "path_hooks", "__code__", "__subclasses__", "_exit", "excepthook",
        "displayhook", "unraisablehook", "__see__", "__raised__", "__hidden__", "pytest_pyfunc_call", "PYTEST_CURRENT_TEST", "ANY",
        "fork", "forkpty", "kill", "register_at_fork",
    }
)  # fmt: skip
_EQUALITY = frozenset(
    {
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__contains__",
        "__instancecheck__",
        "__subclasscheck__",
    }
)
_PLAIN = frozenset({"int", "str", "float", "bytes", "list", "tuple", "dict", "set", "frozenset", "complex"})
_SUSPECT_TEXT = ("/proc/self", "/proc/1", "test_hidden", "hidden_test")
_MAX_BYTES = 1 << 20
_MOST_FILES = 200
_MOST_NAMES = 12


def review(workspace: Path, template: Path, changed: Collection[str]) -> list[str]:
    """Names, as `review:...`, of what the changed files hold more of than the template's; sorted, bounded."""
    found = Counter[str]()
    for path in [each for each in sorted(changed) if each.endswith(".py")][:_MOST_FILES]:
        found += Counter(_names(_read(workspace / path))) - Counter(_names(_read(template / path)))
    return [f"review:{name}" for name in sorted(found)][:_MOST_NAMES]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""


def _names(source: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        yield from _of_node(node)
    if any(isinstance(node, ast.Expr) and _starts_thread(node.value) for node in tree.body):
        yield "thread-at-import"


def _of_node(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import:{alias.name}" for alias in node.names if alias.name.split(".", 1)[0] in _MODULES)
    elif isinstance(node, ast.ImportFrom):
        module = (node.module or "").split(".", 1)[0]
        if module in _MODULES:
            yield f"import:{module}"
        yield from (f"name:{alias.name}" for alias in node.names if alias.name in _NAMES)
    elif isinstance(node, ast.Attribute):
        if node.attr in _NAMES:
            yield f"name:{node.attr}"
        elif node.attr == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys":
            yield "name:sys.modules"
    elif isinstance(node, ast.Name) and node.id in _NAMES:
        yield f"name:{node.id}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from ("text:path" for text in _SUSPECT_TEXT if text in node.value)
        if node.value in _NAMES or node.value in _MODULES:
            yield f"text:{node.value}"
    elif isinstance(node, ast.ClassDef):
        yield from _of_class(node)
    elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__" and len(node.args.args) == 1:
        yield "module-getattr"


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    for each in node.body:
        if not isinstance(each, ast.FunctionDef) or each.name not in _EQUALITY:
            continue
        body = [line for line in each.body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))]
        constant = len(body) == 1 and isinstance(body[0], ast.Return) and isinstance(body[0].value, ast.Constant)
        if bases & _PLAIN or constant:
            yield f"equality:{each.name}"


def _starts_thread(node: ast.expr) -> bool:
    """`Thread(...).start()` where a module is imported."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "start"
        and isinstance(node.func.value, ast.Call)
    )
