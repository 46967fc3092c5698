"""Environments of made tasks: pytest's settings, plugins, and packages from a folder of wheels."""

from __future__ import annotations

import asyncio
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from contracts.artifacts import list_artifacts
from contracts.runtimes import ARCHIVE
from contracts.store import open_store
from curation.tasks.agents import agent_named, play_suite
from curation.tasks.factory import guest
from curation.tasks.factory.environment import needs_index, plugins_of, pytest_settings, sources_of
from curation.tasks.factory.make import MakeConfig, make_suite
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from curation.tasks.runtimes import Project, build_runtime, lock_installed
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import TRUSTED, LocalEnvd
from tests.wheels import pytest_wheels, write_wheel

INI = "[pytest]\nasyncio_mode = auto\naddopts = -x\n"
TOML = '[tool.pytest.ini_options]\npython_functions = ["test", "check_*"]\nxfail_strict = true\n'


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, ()),
        ({"pytest.ini": INI, "pyproject.toml": TOML}, (("asyncio_mode", "auto"),)),
        ({"pyproject.toml": TOML, "tox.ini": INI}, (("python_functions", "test check_*"), ("xfail_strict", "True"))),
        ({"pyproject.toml": "[project]\nname = 'a'\n", "tox.ini": INI}, (("asyncio_mode", "auto"),)),
        ({"pyproject.toml": "[tool.pytest]\nasyncio_mode = 'strict'\n"}, (("asyncio_mode", "strict"),)),
        ({"setup.cfg": "[tool:pytest]\npython_classes = Test Check\n"}, (("python_classes", "Test Check"),)),
        ({"pytest.ini": "[pytest]\naddopts = -q -m 'not slow' --cov\n"}, (("addopts", "-m 'not slow'"),)),
        ({"pyproject.toml": "[tool.pytest]\naddopts = ['-ra', '-m', 'not slow']\n"}, (("addopts", "-m 'not slow'"),)),
        ({"pytest.ini": "[pytest]\naddopts = -m\n"}, ()),
        ({"pytest.ini": "[pytest]\naddopts = 'open\n"}, ()),
        ({"setup.cfg": "[metadata\n", "pytest.ini": "no section\n", "pyproject.toml": "[tool]\npytest = 3\n"}, ()),
    ],
)
def test_settings_are_those_that_pytest_would_read(
    files: dict[str, str], want: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    assert pytest_settings({path: text.encode() for path, text in files.items()}) == want


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, ["bench/test_speed.py", "pack/test_inner.py", "tests/deep/test_b.py", "tests/test_a.py"]),
        ({"pyproject.toml": '[tool.pytest]\ntestpaths = "tests"\n'}, ["tests/deep/test_b.py", "tests/test_a.py"]),
        ({"pytest.ini": "[pytest]\ntestpaths = tests/deep ./pack\n"}, ["pack/test_inner.py", "tests/deep/test_b.py"]),
        ({"setup.cfg": "[tool:pytest]\ntestpaths =\n    tests/test_*.py\n"}, ["tests/test_a.py"]),
        ({"pytest.ini": "[pytest]\ntestpaths = elsewhere\n"}, 4),
        ({"pytest.ini": "[pytest]\ntestpaths = 'open\n"}, 4),
        ({"pyproject.toml": "[tool.pytest]\ntestpaths = 3\n"}, 4),
        ({"pyproject.toml": "[tool.pytest]\ntestpaths = ['.']\n"}, 4),
    ],
)
def test_test_files_are_those_where_pytest_would_look(files: dict[str, str], want: list[str] | int) -> None:
    paths = ("tests/test_a.py", "tests/deep/test_b.py", "tests/helper.py", "bench/test_speed.py", "pack/test_inner.py")
    found = guest.test_files(dict.fromkeys(paths, b"") | {path: text.encode() for path, text in files.items()})
    assert found == want or len(found) == want


def test_plugins_that_change_runs_are_left_out() -> None:
    modules = ["xdist.plugin", "xdist.looponfail", "pytest_cov.plugin", "pytest_asyncio.plugin", "pytest_freezer"]
    assert plugins_of([{"plugins": modules[:3]}, {"plugins": modules[3:]}]) == modules[3:]


@pytest.mark.parametrize(
    ("requirements", "name", "want"),
    [
        ([], "absent-package", False),
        (["pytest>=7", "coverage[toml]"], "absent-package", False),
        (["colorama; sys_platform == 'win32'"], "absent-package", False),
        (["freezegun"], "absent-package", True),
        (["pytest>=7,<8"], "absent-package", True),  # another one than is installed here
        ([], "click", False),
        ([], "coverage", True),  # the installed one would be the solution of its tasks
        ([], "no valid name", False),
    ],
)
def test_an_index_is_asked_for_packages_that_are_not_pytests(requirements: list[str], name: str, want: bool) -> None:
    assert needs_index(Project(name, "1", requirements)) is want


def test_runtime_of_what_is_installed_is_pytest_alone_with_equal_bytes(tmp_path: Path) -> None:
    lock = lock_installed(Project("sums", "1.5", []))
    built = [build_runtime(open_store(str(tmp_path / name)), lock) for name in ("one", "two")]
    assert len({each.meta["digest"] for each in built}) == 1
    assert {each["name"].lower() for each in built[0].json("packages.json")} >= {"pytest", "pluggy", "coverage"}
    with tarfile.open(built[0].path(ARCHIVE)) as archive:
        names = archive.getnames()
    tops = {name.partition("/")[0] for name in names}
    assert {"pytest", "_pytest", "coverage", "sums-1.5.dist-info"} <= tops
    assert not tops & {"torch", "dagster", "sums", "bin"} and not any("__pycache__" in name for name in names)
    assert "pytest/__init__.py" in sources_of(built[0])


PACK = {
    "LICENSE": "Permission is hereby granted, free of charge, to any person",
    "pyproject.toml": """
[project]
name = "sums"
version = "1"
dependencies = ["onemore"]
[dependency-groups]
test = ["watcher", "pytest"]
""",
    "sums.py": (
        "from onemore import more\n\n\ndef add_more(a, b):\n    return a + more(b) - 1\n\n\n"
        "def take(a, b):\n    return a - more(b) + 1\n"
    ),
    "test_take.py": "from sums import take\n\n\ndef test_take():\n    assert take(5, 3) == 2\n",
    "test_sums.py": """
import importlib.util
import pytest
from sums import add_more


@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4)])
def test_add(a, b, doubled):
    assert doubled(add_more(a, b)) == 2 * (a + b)


def test_packages_are_those_of_the_runtime():
    assert importlib.util.find_spec("grpc") is None
    assert add_more(0, 0) == 0
""",
}
PLUGIN = b"import pytest\n\n\n@pytest.fixture\ndef doubled():\n    return lambda value: 2 * value\n"


@pytest.mark.slow
def test_made_tasks_bring_the_packages_of_their_repository(tmp_path: Path) -> None:
    wheels, source, store = tmp_path / "wheels", tmp_path / "sums", open_store(str(tmp_path / "store"))
    for folder in (wheels, source):
        folder.mkdir()
    for path, text in PACK.items():
        (source / path).write_text(text)
    pytest_wheels(wheels)
    write_wheel(wheels, "onemore", "1", {"onemore.py": b"def more(n):\n    return n + 1\n"})
    write_wheel(wheels, "watcher", "1", {"watcher.py": PLUGIN}, plugin="watcher")
    coverage = metadata.distribution("coverage")
    modules = {str(each): Path(str(each.locate())) for each in coverage.files or () if each.suffix == ".py"}
    write_wheel(wheels, "coverage", coverage.version, {name: path.read_bytes() for name, path in modules.items()})

    async def play(address: str) -> None:
        async with SandboxClient(address) as client:
            config = MakeConfig(count=8, strategies=("mutate",))
            suite = await make_suite(str(source), config, DEFAULT_SHARES, store, client, wheelhouse=wheels)
            (runtime,) = list_artifacts(store, "runtime")
            assert suite.manifest.parents["runtime"] == runtime.ref
            assert {each["name"] for each in suite.json("card.json")["packages"]} >= {"onemore", "watcher"}
            tasks = list(suite_tasks(suite, None).values())
            assert {task.environment.runtime for task in tasks} == {runtime.meta["digest"]}
            graded = {(task.tests[0].split("::")[0], task.environment.plugins) for task in tasks}
            assert graded == {("test_sums.py", ("watcher",)), ("test_take.py", ())}
            for name, solved in (("oracle", True), ("noop", False)):
                played = await play_suite(tasks, agent_named(name), client, Verifier(client, None, runtimes=store))
                assert [each.verdict.solved for each in played] == [solved] * len(tasks)

    with LocalEnvd(rules=TRUSTED) as envd:
        asyncio.run(play(envd.address))
