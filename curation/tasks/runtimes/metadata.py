"""Requirements of a repository and of its tests, parsed from its metadata without executing any of it.

pyproject.toml ([project], [dependency-groups], [tool.poetry]), PKG-INFO, setup.cfg, setup.py (literals), requirements
files. What one leaves open, the next may say.
"""

from __future__ import annotations

import ast
import configparser
import email.parser
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import TypeAdapter, ValidationError

from contracts.syntax import parse_python
from curation.errors import TaskError

_TEST = re.compile(r"(unit)?tests?|testing|pytest|(unit-?)?tests?[-_].*|.*[-_](unit-?)?tests?")
_DEVELOP = frozenset({"dev", "develop", "development", "all"})
_TOOLS = re.compile(
    r"(mypy|pyright|ruff|black|flake8|pylint|isort|codespell|pre-commit|tox|nox|twine|build|wheel|bump.*|invoke|furo"
    r"|(sphinx|mkdocs|flake8|types|tox|myst)[-_].*|sphinx|mkdocs)"
)
"""Packages for developers that no test imports."""
_FILES = (
    "requirements/test*.in",
    "requirements/test*.txt",
    "requirements[-_]test*.txt",
    "test[-_]requirements*.txt",
    "test*/requirements*.txt",
    "requirements/dev*.txt",
    "requirements[-_]dev*.txt",
    "dev[-_]requirements*.txt",
)
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters that the name of an installed distribution does not have: setuptools, too, writes `-` for them."""
_COMPILERS = {"mesonpy": "meson", "maturin": "maturin", "scikit_build_core": "CMake", "setuptools_rust": "Rust"}


@dataclass
class Project:
    """What a repository says about itself."""

    name: str = ""
    version: str = ""
    requirements: list[str] = field(default_factory=list)
    """Requirements of the package and of its tests, as PEP 508 text."""
    entry_points: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Requirements that can't be locked by hash, such as URLs."""


@dataclass
class _Found:
    """Metadata of one source; None: it does not say."""

    name: str | None = None
    version: str | None = None
    needs: list[str] | None = None
    extras: dict[str, list[str]] = field(default_factory=dict)
    tests: list[str] = field(default_factory=list)
    entry_points: dict[str, dict[str, str]] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    """What it computes by code."""


def read_project(tree: Mapping[str, bytes]) -> Project:
    """Metadata of a repository: files by path.

    Raises TaskError, in one line, for metadata that can't be parsed or needs code to be run, and for a package that
    must be compiled.
    """
    text = {path: _text(path, data) for path, data in tree.items() if "/" not in path and path in _READERS}
    # setup.py last, since it is code
    sources = [_read(path, text[path]) for path in _READERS if path in text]
    if not sources and not any(path.endswith(".py") for path in tree):
        raise TaskError("it holds no Python: neither pyproject.toml, setup.cfg nor setup.py, nor any module")
    found = _merged(sources)
    extras = {str(canonicalize_name(name)): needs for name, needs in found.extras.items()}
    tests = found.tests or [each for name in _chosen(extras) for each in extras[name]] or _from_files(tree)
    needed = {"install_requires": found.needs is None, "extras_require": not tests}
    if computed := [each for each in found.computed if needed.get(each, False)]:
        raise TaskError(
            f"its setup.py computes {computed[0]}, and code of a repository is not run for its metadata: write it to"
            " pyproject.toml, or make an sdist, whose PKG-INFO has it"
        )
    project = Project(*_named(found), entry_points=found.entry_points)
    own = canonicalize_name(project.name)
    needs = list(_expanded(found.needs or (), own, extras))
    needs += [each for each in _expanded(tests, own, extras) if not _TOOLS.fullmatch(canonicalize_name(each.name))]
    project.requirements = sorted({str(each) for each in needs if not each.url})
    project.left_out = sorted({str(each) for each in needs if each.url})
    return project


def _text(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"its {path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _read(path: str, text: str) -> _Found:
    """Metadata of one source. Raises TaskError, also for values of wrong types."""
    try:
        return _FOUND.validate_python(vars(_READERS[path](text)))
    except ValidationError as error:
        fault = error.errors()[0]
        why = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        why = str(error)
    except RecursionError:
        raise TaskError(f"its {path} is nested too deeply") from None
    raise TaskError(f"its {path} has a value of a wrong type ({why})")


def _named(found: _Found) -> tuple[str, str]:
    """Name and version of the repository's distribution, which become the name of a folder.

    A version that is none, such as `@VERSION@`, counts as one that is not given.
    """
    name, version = (found.name or "").strip(), (found.version or "").strip()
    if "/" in name:
        raise TaskError(f"its name is a path: {name!r}; correct it")
    name = _NO_NAME.sub("-", name).strip("-._")
    try:
        Version(version)
    except InvalidVersion:
        version = "0"
    return name, version


def _merged(sources: Iterable[_Found]) -> _Found:
    merged = _Found()
    for each in sources:
        merged.name, merged.version = merged.name or each.name, merged.version or each.version
        merged.needs = each.needs if merged.needs is None else merged.needs
        merged.extras = {**each.extras, **merged.extras}
        merged.tests = merged.tests or each.tests
        merged.entry_points = merged.entry_points or each.entry_points
        merged.computed += each.computed
    return merged


def _chosen(names: Iterable[str]) -> list[str]:
    """Names of the extras or groups that tests need: those for tests, else those for development."""
    names = sorted(names)
    return [each for each in names if _TEST.fullmatch(each)] or [each for each in names if each in _DEVELOP]


def _expanded(lines: Iterable[str], own: str, extras: Mapping[str, list[str]]) -> Iterator[Requirement]:
    """Requirements without the repository's own distribution, whose extras are followed."""
    left, seen = list(lines), set[str]()
    while left:
        line = left.pop(0)
        try:
            need = Requirement(line)
        except InvalidRequirement as error:
            raise TaskError(f"its requirement {line!r} is invalid: {str(error).splitlines()[0]}") from None
        if canonicalize_name(need.name) != own:
            yield need
        elif not seen >= need.extras:
            left += [each for name in need.extras - seen for each in extras.get(canonicalize_name(name), ())]
            seen |= need.extras


def _pyproject(text: str) -> _Found:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"its pyproject.toml can't be parsed: {error}") from None
    return _of_tables(read)


def _of_tables(read: dict[str, Any]) -> _Found:
    backend = str(read.get("build-system", {}).get("build-backend", "")).partition(".")[0]
    if backend in _COMPILERS:
        raise TaskError(
            f"it is compiled with {_COMPILERS[backend]} ({backend}): a runtime holds no package of the repository"
            " itself, so only repositories that run from their sources can be used"
        )
    project, tool = read.get("project", {}), read.get("tool", {})
    poetry, dynamic = tool.get("poetry", {}), set(project.get("dynamic", ()))
    found = _Found(project.get("name") or poetry.get("name"), project.get("version") or poetry.get("version"))
    if "dependencies" in project or (project and "dependencies" not in dynamic):
        found.needs = list(project.get("dependencies", ()))
    elif "dependencies" in poetry:
        found.needs = list(_poetry(poetry["dependencies"]))
    found.extras = {name: list(needs) for name, needs in project.get("optional-dependencies", {}).items()}
    groups = read.get("dependency-groups", {})
    groups = {name: list(_group(groups, name)) for name in groups} | {
        name: list(_poetry(group.get("dependencies", {}))) for name, group in poetry.get("group", {}).items()
    }
    groups |= {name: list(needs) for name, needs in tool.get("pdm", {}).get("dev-dependencies", {}).items()}
    if "dev-dependencies" in poetry:
        groups.setdefault("dev", list(_poetry(poetry["dev-dependencies"])))
    for name, group in tool.get("hatch", {}).get("envs", {}).items():
        groups.setdefault(name, [*group.get("dependencies", ()), *group.get("extra-dependencies", ())])
    named = [name for name in groups if _TEST.fullmatch(name)]
    if named or not _chosen(found.extras):
        found.tests = [each for name in named or _chosen(groups) for each in groups[name]]
    found.tests += [each for name in found.extras if named and _TEST.fullmatch(name) for each in found.extras[name]]
    found.entry_points = {
        **project.get("entry-points", {}),
        **({"console_scripts": project["scripts"]} if "scripts" in project else {}),
    }
    return found


def _group(groups: dict[str, Any], name: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Requirements of a dependency group (PEP 735)."""
    if name not in groups or name in above:
        raise TaskError(f"its dependency group {name!r} is missing, or includes itself")
    for each in groups[name]:
        if isinstance(each, dict):
            yield from _group(groups, each["include-group"], (*above, name))
        else:
            yield str(each)


def _poetry(table: dict[str, Any]) -> Iterator[str]:
    """Requirements of a table of Poetry: `name = "^1.2"`."""
    for name, wanted in table.items():
        wanted = wanted[0] if isinstance(wanted, list) else wanted
        about = wanted if isinstance(wanted, dict) else {"version": wanted}
        if name.lower() == "python" or about.get("optional"):
            continue
        if "version" not in about:
            yield f"{name} @ {about.get('git') or about.get('url') or 'file:///' + str(about.get('path', ''))}"
            continue
        extras = f"[{','.join(about['extras'])}]" if about.get("extras") else ""
        yield f"{name}{extras}{_range(str(about['version']))}" + (
            f" ; {about['markers']}" if about.get("markers") else ""
        )


def _range(version: str) -> str:
    """Specifiers of a version range in Poetry's form."""
    return ",".join(_bounds(part.strip()) for part in version.split(",") if part.strip() not in ("", "*"))


def _bounds(part: str) -> str:
    match = re.fullmatch(r"([~^]?)\s*(\d+(?:\.\d+)*)(.*)", part)
    if match is None or match[3] == ".*":
        return f"=={part}" if match else part
    if not match[1]:
        return f"=={part}"
    numbers = [int(each) for each in match[2].split(".")]
    fixed = next((at for at, each in enumerate(numbers) if each), len(numbers) - 1) if match[1] == "^" else 1
    fixed = min(fixed, len(numbers) - 1)
    above = [*numbers[:fixed], numbers[fixed] + 1]
    return f">={match[2]}{match[3]},<{'.'.join(map(str, above))}"


def _pkg_info(text: str) -> _Found:
    read = email.parser.Parser().parsestr(text, headersonly=True)
    found = _Found(read["Name"], read["Version"])
    dynamic = {each.strip().lower() for each in read.get_all("Dynamic", [])}
    needs = read.get_all("Requires-Dist", [])
    if needs or ((read["Metadata-Version"] or "0") >= "2.2" and "requires-dist" not in dynamic):
        found.needs = []
        for line in needs:
            before, _, name = line.partition("extra ==")
            if name:
                bare = re.sub(r"\s*(;|and)\s*\(?$", "", before.strip().rstrip("(").strip())
                found.extras.setdefault(re.sub(r"[\"')\s]", "", name), []).append(bare)
            else:
                found.needs.append(line)
    return found


def _setup_cfg(text: str) -> _Found:
    read = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        read.read_string(text)
    except configparser.Error as error:
        raise TaskError(f"its setup.cfg can't be parsed: {' '.join(str(error).split())}") from None

    def lines(section: str, key: str) -> list[str]:
        listed = read.get(section, key, fallback="").replace(";\n", "\n").split("\n")
        return [line.strip() for line in listed if line.strip() and not line.strip().startswith("#")]

    version = read.get("metadata", "version", fallback="")
    found = _Found(read.get("metadata", "name", fallback=None), version if re.match(r"\d", version) else None)
    if read.has_option("options", "install_requires"):
        found.needs = lines("options", "install_requires")
        if any(line.startswith("file:") for line in found.needs):
            raise TaskError("its setup.cfg reads install_requires from a file: list them in setup.cfg")
    found.tests = lines("options", "tests_require")
    if read.has_section("options.extras_require"):
        found.extras = {name: lines("options.extras_require", name) for name in read["options.extras_require"]}
    return found


def _setup_py(text: str) -> _Found:
    try:
        module = parse_python(text)
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"its setup.py can't be parsed ({error})") from None
    known = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    call = next((node for node in ast.walk(module) if isinstance(node, ast.Call) and _called(node) == "setup"), None)
    keywords = {each.arg: each.value for each in call.keywords if each.arg} if call else {}
    if "ext_modules" in keywords and not _is_optional(module):
        raise TaskError(
            "it has a C extension (setup.py: ext_modules) that must be compiled: a runtime holds no package of the"
            " repository itself, so only repositories that run from their sources can be used"
        )

    def literal(key: str, default: Any) -> Any:
        value = keywords.get(key)
        try:
            value = known.get(value.id, value) if isinstance(value, ast.Name) else value
            return default if value is None else ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError):
            found.computed += (key,)
            return default

    found = _Found()
    found.name, found.version = literal("name", None), literal("version", None)
    needs = literal("install_requires", [])
    found.needs = None if "install_requires" in found.computed else _listed(needs)
    found.extras = {str(name): _listed(needs) for name, needs in literal("extras_require", {}).items()}
    found.tests = _listed(literal("tests_require", []))
    return found


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_optional(module: ast.Module) -> bool:
    made = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _called(node) == "Extension"]
    return all(any(each.arg == "optional" for each in node.keywords) for node in made) and bool(made)


def _listed(value: str | Iterable[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _from_files(tree: Mapping[str, bytes]) -> list[str]:
    """Requirements of tests from a requirements file of a usual name, the first there is."""
    for pattern in _FILES:
        for path in sorted(each for each in tree if fnmatch(each, pattern) and each.count("/") == pattern.count("/")):
            lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in _text(path, tree[path]).splitlines()]
            return [re.split(r"\s+--|\s*\\$", line)[0] for line in lines if line and not line.startswith(("-", "."))]
    return []


_READERS = {"pyproject.toml": _pyproject, "PKG-INFO": _pkg_info, "setup.cfg": _setup_cfg, "setup.py": _setup_py}
_FOUND = TypeAdapter(_Found)
