"""Which of a diff's changes are undone before hidden tests run, and under which name: what steers Python or pytest in
place of solving the task.

configuration   conftest.py, pytest.ini, sitecustomize.py, *.pth ...      as the template has it
compiled code   *.so, *.pyc, *.pyd, *.egg: it would run instead of source
shadows         a new module with the name of one of Python's, of pytest, or of a package that a hidden test imports
helpers         test helpers of the template, which hidden tests rely on
twins           what pytest or an import could take for a hidden test file
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import PathFinder
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
    changed: Collection[str], template: Path, hidden: Mapping[str, bytes], product: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Paths to undo, each with its note, which is empty for tests that no hidden one imports. changed: paths that
    differ from the template's, in any order. product: what solutions change, no helpers.
    """
    imported = frozenset().union(*(imports(content) for path, content in hidden.items() if path.endswith(".py")))
    here = {PurePosixPath(path).parent / PurePosixPath(path).stem for path in hidden}
    names = {PurePosixPath(path).name for path in hidden}
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
            and (name in names or _is_twin(PurePosixPath(path), here) or _shadows_tests(PurePosixPath(path), template))
        ):
            yield path, f"undone:twin:{name}"
        elif (shadow := _shadow(path, template)) is not None:
            yield path, f"shadowed:{shadow}"
        elif path not in hidden and path not in product and _is_helper(path, template, imported):
            quiet = _TEST.fullmatch(name) and PurePosixPath(path).stem not in imported
            yield path, "" if quiet else f"restored:{path}"


def imports(source: bytes) -> frozenset[str]:
    """Modules that a file imports, by full name, and the names that it imports from them; none when it is no Python."""
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


def _shadows_tests(path: PurePosixPath, template: Path) -> bool:
    """Whether a new file stands in for a helper or a package of the tests, or for one of Python's modules among
    them.
    """
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
    """The module of Python's or of a package that this new file would stand in for."""
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


def _is_helper(path: str, template: Path, imported: Collection[str]) -> bool:
    """Whether a file of the template belongs to its tests: it lies among them, is named as tests are, imports pytest,
    or is a helper that they import.
    """
    if not (template / path).is_file():
        return False
    place = PurePosixPath(path)
    if _TESTS & set(place.parts[:-1]) or _TEST.fullmatch(place.name):
        return True
    if len(place.parts) == 1 and place.stem in imported and _HELPER.fullmatch(place.name):
        return True
    return place.suffix == ".py" and _TESTING.search((template / path).read_bytes()) is not None
