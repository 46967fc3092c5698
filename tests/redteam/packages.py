"""Three packages of PyPI with their own tests, imported as tasks through the project's importer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import TriplaneError
from curation.tasks.importing.suite import read_source
from tests.archives import extract
from tests.redteam.worlds import World, world_of

_UNREACHABLE = ("No matching distribution", "Could not find a version", "Max retries", "Temporary failure in name")


class NoIndexError(TriplaneError):
    """No package index can be reached from here."""


@dataclass(frozen=True)
class Package:
    """A source distribution, the bug that is put into it, and the tests that must pass after the fix."""

    name: str
    version: str
    path: str
    """The file with the bug, which also defines the tested function."""
    right: str
    wrong: str
    tested: str
    module: str
    tests: tuple[str, ...]
    hidden: tuple[str, ...]
    kinds: str
    moved: tuple[tuple[str, str], ...] = ()
    """Files copied to where the tests import them from without the package's own pytest options."""
    edits: tuple[tuple[str, str, str], ...] = ()
    """File, text and other text: what its conftest takes from plugins that the verifier does not load."""


PACKAGES = (
    Package(
        "toolz",
        "1.0.0",
        "toolz/dicttoolz.py",
        "for d in dicts:\n        rv.update(d)",
        "for d in dicts[:1]:\n        rv.update(d)",
        "merge",
        "toolz.dicttoolz",
        (
            "toolz/tests/test_dicttoolz.py::TestDict::test_merge",
            "toolz/tests/test_dicttoolz.py::test_merge_with_non_dict_mappings",
            "toolz/tests/test_dicttoolz.py::TestDefaultDict::test_merge",
        ),
        ("toolz/tests",),
        "dict class package compared",
    ),
    Package(
        "inflection",
        "0.5.1",
        "inflection/__init__.py",
        "if number % 100 in (11, 12, 13):",
        "if number % 100 in (11, 12):",
        "ordinal",
        "inflection",
        (
            "test_inflection.py::test_ordinal",
            "test_inflection.py::test_ordinalize",
            "test_inflection.py::test_dasherize",
        ),
        ("test_inflection.py",),
        "text parametrize package compared",
    ),
    Package(
        "semver",
        "3.0.4",
        "src/semver/_deprecated.py",
        "return Version.parse(ver1).compare(ver2)",
        "return Version.parse(ver2).compare(ver1)",
        "compare",
        "semver._deprecated",
        (
            "tests/test_compare.py::test_should_get_less",
            "tests/test_compare.py::test_should_get_greater",
            "tests/test_compare.py::test_should_raise_value_error_for_invalid_value",
        ),
        ("tests/test_compare.py",),
        "int parametrize raises conftest package relative compared",
        (("tests/coerce.py", "coerce.py"), ("tests/semverwithvprefix.py", "semverwithvprefix.py")),
        (("tests/conftest.py", "@pytest.fixture(autouse=True)", "@pytest.fixture"),),
    ),
)


def imported(scratch: Path) -> list[World]:
    """The three as worlds. scratch: an empty directory. Raises NoIndexError where they can't be had."""
    tasks = scratch / "tasks"
    tasks.mkdir()
    for package in PACKAGES:
        _unpack(package, scratch, tasks / package.name)
    reading = read_source(tasks)
    assert not reading.broken, reading.broken
    found = {task.task_id: task for task in reading.tasks}
    return [
        world_of(
            each.name, found[each.name], each.kinds.split(), tested=each.tested, path=each.path, module=each.module
        )
        for each in PACKAGES
    ]


def _unpack(package: Package, scratch: Path, place: Path) -> None:
    wanted = f"{package.name}=={package.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        package.name,
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*command, "-q", "-d", str(scratch), wanted], capture_output=True, text=True, timeout=250, check=False
    )
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        raise NoIndexError(f"no package index gives {wanted}: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (archive,) = scratch.glob(f"{package.name}-*.tar.gz")
    extract(archive, scratch)
    (scratch / archive.name.removesuffix(".tar.gz")).rename(place)
    fixed = (place / package.path).read_text()
    assert fixed.count(package.right) == 1, f"{wanted}: {package.right!r} occurs {fixed.count(package.right)} times"
    target = place / "fixed" / package.path
    target.parent.mkdir(parents=True)
    target.write_text(fixed)
    (place / package.path).write_text(fixed.replace(package.right, package.wrong))
    for source, copy in package.moved:
        (place / copy).write_bytes((place / source).read_bytes())
    for file, text, other in package.edits:
        (place / file).write_text((place / file).read_text().replace(text, other))
    lines = [
        f"instruction: repair {package.tested} in {package.path}",
        "reference: fixed",
        "tests:",
        *(f"  - {test}" for test in package.tests),
        "hidden:",
        *(f"  - {path}" for path in package.hidden),
    ]
    (place / "task.yaml").write_text("\n".join(lines) + "\n")
