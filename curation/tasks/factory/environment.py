"""Environment of a repository's tasks: its packages as a runtime, and the pytest plugins and settings of its tests."""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import shlex
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from contracts.artifacts import Artifact
from contracts.runtimes import ARCHIVE
from contracts.store import Store
from contracts.tasks import Environment
from curation.errors import TaskError
from curation.tasks.factory.source import Repository
from curation.tasks.factory.steps import recall, record, step_key
from curation.tasks.runtimes import Lock, Project, build_runtime, lock_installed, read_project, resolve

_ALWAYS = frozenset({"pytest", "pluggy", "iniconfig", "packaging", "pygments", "coverage"})
"""Packages that are installed beside envd for running tests."""
_CHANGE_RUNS = (
    "_hypothesis_pytestplugin pytest_cov pytest_html pytest_metadata pytest_mypy pytest_mypy_plugins"
    " pytest_randomly pytest_rerunfailures pytest_sugar pytest_timeout random_order testmon xdist"
)
"""Plugins, by their first module, that change which tests run, in which process or how long. No test needs them."""
_SETTINGS = ("anyio_mode", "asyncio_mode", "python_classes", "python_functions", "xfail_strict")
"""Settings of pytest by which a repository says what its tests are; others say how to run or report them."""
_SECTIONS = {"pytest.ini": "pytest", ".pytest.ini": "pytest", "tox.ini": "pytest", "setup.cfg": "tool:pytest"}
"""Files with settings beside pyproject.toml, and their section."""


@dataclass(frozen=True)
class Surroundings:
    """What a repository's tests run in."""

    environment: Environment
    runtime: Artifact
    """The artifact behind `environment.runtime`."""


def surroundings_of(
    repository: Repository, store: Store, *, index: str | None = None, wheelhouse: Path | None = None
) -> Surroundings:
    """Resolve and publish the packages that a repository's tests need, without running any of its code.

    If these are pytest's alone, they are taken from what is installed here, and no index is asked: the tasks do not see
    envd's other packages, in which copies of their code may stand. index: URL of a package index. wheelhouse: folder of
    wheels, used instead. Raises TaskError in one line.
    """
    try:
        project = read_project(repository.tree)
        settings = pytest_settings(repository.tree)
        asks = needs_index(project)
        lock = _lock(project, store, index, wheelhouse) if asks else lock_installed(project)
        runtime = build_runtime(store, lock, index=index, wheelhouse=wheelhouse)
    except TaskError as error:
        raise TaskError(f"{repository.source}: {error}") from error
    environment = Environment(runtime.meta["digest"], tuple(plugins_of(runtime.json("packages.json"))), settings)
    return Surroundings(environment, runtime)


def sources_of(runtime: Artifact) -> dict[str, bytes]:
    """Python sources of a runtime's packages, by path."""
    with tarfile.open(runtime.path(ARCHIVE)) as archive:
        members = ((each, archive.extractfile(each)) for each in archive if each.name.endswith(".py"))
        return {each.name: file.read() for each, file in members if file is not None}


def _lock(project: Project, store: Store, index: str | None, wheelhouse: Path | None) -> Lock:
    """The lock of a project, which stays the same in a store, so that a resumed run finds its results."""
    key = step_key("lock", [dataclasses.asdict(project), sys.version_info[:2], sysconfig.get_platform()])
    found = recall(store, key)
    if found is None:
        lock = resolve(project, index=index, wheelhouse=wheelhouse, requirements=["coverage"])
        found = record(store, key, lock.model_dump(mode="json"))
    return Lock.model_validate(found)


def needs_index(project: Project) -> bool:
    """Whether tests need other packages than pytest's, or other versions; or the repository is one of these."""
    wanted = [Requirement(each) for each in project.requirements]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    names = {canonicalize_name(each.name) for each in wanted}
    if not names <= _ALWAYS or canonicalize_name(project.name) in _ALWAYS:
        return True
    return not all(each.specifier.contains(metadata.version(each.name), prereleases=True) for each in wanted)


def plugins_of(packages: list[dict[str, Any]]) -> list[str]:
    """Modules that pytest loads as plugins, of a runtime's packages.json: those whose fixtures and marks tests use."""
    found = {module for each in packages for module in each["plugins"]}
    return sorted(module for module in found if module.partition(".")[0] not in _CHANGE_RUNS.split())


def pytest_settings(tree: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    """Settings of pytest that say what a repository's tests are."""
    found = _settings_of(tree)
    settings = {key: _text(found[key]) for key in _SETTINGS if key in found}
    marks = _marks(found.get("addopts", ""))
    return tuple(sorted((settings | ({"addopts": marks} if marks else {})).items()))


def test_paths(tree: Mapping[str, bytes]) -> list[str]:
    """Patterns of the files and folders in which pytest looks for tests; empty: everywhere."""
    found = _settings_of(tree).get("testpaths", "")
    try:
        words = shlex.split(found) if isinstance(found, str) else [str(each) for each in found]
    except (TypeError, ValueError):
        return []
    return [str(PurePosixPath(each)) for each in words]


def _settings_of(tree: Mapping[str, bytes]) -> Mapping[str, Any]:
    """Settings of the file that pytest would read."""
    for path in ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        if path in tree:
            text = tree[path].decode(errors="replace")
            found = _of_toml(text) if path == "pyproject.toml" else _of_ini(text, _SECTIONS[path])
            if found is not None:
                return found
    return {}


def _marks(options: Any) -> str:
    """The option of `addopts` that leaves out tests by their marks, such as `-m 'not slow'`; empty without one.

    A repository's other options say how to run or report its tests.
    """
    try:
        words = options if isinstance(options, list) else shlex.split(str(options))
    except ValueError:
        return ""
    chosen = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    chosen.add_argument("-m", default="")
    try:
        expression = chosen.parse_known_args([str(word) for word in words])[0].m
    except argparse.ArgumentError:
        return ""
    return shlex.join(["-m", expression]) if expression else ""


def _of_toml(text: str) -> Mapping[str, Any] | None:
    try:
        tables = tomllib.loads(text).get("tool", {}).get("pytest")
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError):
        return None
    if not isinstance(tables, dict):
        return None
    settings = tables.get("ini_options", tables)
    return settings if isinstance(settings, dict) else None


def _of_ini(text: str, section: str) -> Mapping[str, Any] | None:
    read = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        read.read_string(text)
    except configparser.Error:
        return None
    return read[section] if read.has_section(section) else None


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value).strip()
