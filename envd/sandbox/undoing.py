"""Choose and name the changes of a diff to undo before hidden tests run: those that influence Python or pytest.

configuration   conftest.py, pytest.ini, sitecustomize.py, *.pth ...      restored from the template
compiled code   *.so, *.pyc, *.pyd, *.egg: would run instead of source
shadows         new modules with the name of a module of Python, of pytest, or of an installed package
helpers         test helpers of the template, which hidden tests use
twins           files that pytest or an import could take for a hidden test file
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from itertools import takewhile
from pathlib import Path, PurePosixPath

CONFIGURATION = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "usercustomize.py",
    }
)
_COMPILED = (".so", ".pyc", ".pyo", ".pyd", ".egg", ".pyz", ".dll", ".dylib")
_METADATA = (".dist-info", ".egg-info", ".egg-link")
_OURS = frozenset({"pytest", "_pytest", "pluggy", "unittest", "envd", "contracts", "iniconfig"})
_TESTS = frozenset({"tests", "test", "testing", "_tests", "_test"})
_TEST = re.compile(r"(test_.*|.*_tests?|tests?)\.py")
_HELPER = re.compile(r"(.*helpers?|.*testing|.*fixtures?|.*assert.*|.*check.*|.*matchers?)\.py")
_TESTING = re.compile(rb"^\s*(import|from)\s+(pytest|unittest)\b", re.MULTILINE)


def unwanted(
    changed: Collection[str],
    template: Path,
    hidden: Mapping[str, bytes],
    product: Collection[str] = (),
    tests: Collection[str] = (),
) -> Iterator[tuple[str, str]]:
    """Yield paths to undo, each with its note, which is empty for tests that no hidden test imports.

    changed: paths that differ from the template's, in any order. product: files that solutions change and that do not
    count as helpers. tests: names of the tests that run.
    """

    @cache
    def imported() -> frozenset[str]:
        """Modules that the hidden tests import. Parsing the tests takes as long as a short run."""
        return frozenset().union(*(imports(content) for path, content in hidden.items() if path.endswith(".py")))

    here = {PurePosixPath(path).parent / PurePosixPath(path).stem for path in hidden}
    named = {test.partition("::")[0] for test in tests}
    for path in changed:
        name = PurePosixPath(path).name
        if name in CONFIGURATION or name.endswith(".pth"):
            yield path, f"undone:{name}"
        elif name.endswith(_COMPILED):
            yield path, f"compiled:{name}"
        elif any(part.endswith(_METADATA) for part in PurePosixPath(path).parts):
            yield path, f"undone:{name}"
        elif (
            path not in hidden
            and not (template / path).exists()
            and (
                _is_twin(PurePosixPath(path), here)
                or _shadows_tests(PurePosixPath(path), template)
                or _could_be_hidden(PurePosixPath(path), hidden, named)
            )
        ):
            yield path, f"undone:twin:{name}"
        elif (shadow := _shadow(path, template)) is not None:
            yield path, f"shadowed:{shadow}"
        elif path not in hidden and path not in product and _is_helper(path, template, imported):
            quiet = _TEST.fullmatch(name) and PurePosixPath(path).stem not in imported()
            yield path, "" if quiet else f"restored:{path}"


def imports(source: bytes) -> frozenset[str]:
    """Full names of modules that a file imports, and the names that it imports from them; empty if not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {alias.name for alias in node.names}
    return frozenset(found)


def _is_twin(path: PurePosixPath, hidden: Collection[PurePosixPath]) -> bool:
    stem = path.parent / path.name.split(".", 1)[0]
    return stem in hidden or any(parent.parent / parent.stem in hidden for parent in path.parents)


def _could_be_hidden(path: PurePosixPath, hidden: Mapping[str, bytes], named: Collection[str]) -> bool:
    """Whether an import of a hidden module or pytest could find a new file of the same name instead.

    named: files with named tests. Other modules count if a hidden file says a name by which both could be imported.
    """
    for each in hidden:
        other = PurePosixPath(each)
        if path.name != other.name or path.suffix != ".py":
            continue
        if each in named or _TEST.fullmatch(path.name):
            return True
        if path.name == "__init__.py":
            if path.parent.name == other.parent.name:
                return True
            continue
        same = list(takewhile(lambda pair: pair[0] == pair[1], zip(_module(path), _module(other), strict=False)))
        for count in range(1, len(same) + 1):
            module = ".".join(part for part, _ in reversed(same[:count]))
            if any(_says(where, content, module) for where, content in hidden.items()):
                return True
    return False


def _says(path: str, content: bytes, module: str) -> bool:
    """Whether a file imports a module by this full name, or contains the name in a string."""
    said = re.compile(rf"(?<![\w.]){re.escape(module)}\b")
    return any(map(said.search, _texts(path, content)))


@lru_cache(256)
def _texts(path: str, content: bytes) -> tuple[str, ...]:
    """Full names that a Python file imports, and its strings except docstrings; all text of any other file."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return (content.decode(errors="surrogateescape"),)
    package = PurePosixPath(path).parts[:-1]
    found, silent = list[str](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            name = ".".join((*above, *([node.module] if node.module else ())))
            found += [name, *(f"{name}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Expr):
            silent.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and node not in silent:
            found.append(str(node.value))
    return tuple(found)


def _module(path: PurePosixPath) -> tuple[str, ...]:
    """Parts of a module's full name, the last first."""
    return (path.stem, *reversed(path.parts[:-1]))


def _shadows_tests(path: PurePosixPath, template: Path) -> bool:
    """Whether a new file shadows a helper or a package of the tests, or a module of Python in a test directory."""
    if path.suffix == ".py" and path.stem in _TESTS and (template / path.with_suffix("")).is_dir():
        return True
    for depth, part in enumerate(path.parts[:-1]):
        if part in _TESTS:
            name = path.parts[depth + 1].split(".", 1)[0]
            place = template.joinpath(*path.parts[: depth + 1])
            package = len(path.parts) > depth + 2 and (place / f"{name}.py").is_file()
            return package or (
                name in sys.stdlib_module_names and not (place / name).exists() and not (place / f"{name}.py").exists()
            )
    return False


def _shadow(path: str, template: Path) -> str | None:
    """Name of the module of Python or of a package that a new file would shadow, else None."""
    parts = PurePosixPath(path).parts
    if parts[0] == "src" and len(parts) > 1 and (template / "src").is_dir():
        parts = parts[1:]
        base = template / "src"
    else:
        base = template
    name = parts[0].split(".", 1)[0]
    if not path.endswith(".py") and len(parts) == 1:
        return None
    if (base / name).exists() or (base / f"{name}.py").exists():
        return None  # the task's own
    return name if name in sys.stdlib_module_names or name in _OURS or _installed(name) else None


@lru_cache(256)
def _installed(name: str) -> bool:
    places = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return PathFinder.find_spec(name, places) is not None


def _is_helper(path: str, template: Path, imported: Callable[[], Collection[str]]) -> bool:
    """Whether a template's file belongs to its tests.

    Such a file is in a test directory, has a test's name, imports pytest or unittest, or is a helper that tests import.
    """
    if not (template / path).is_file():
        return False
    place = PurePosixPath(path)
    if _TESTS & set(place.parts[:-1]) or _TEST.fullmatch(place.name):
        return True
    if len(place.parts) == 1 and _HELPER.fullmatch(place.name) and place.stem in imported():
        return True
    return place.suffix == ".py" and _TESTING.search((template / path).read_bytes()) is not None
