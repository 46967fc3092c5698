"""A package of other people's, from its source distribution, with its own tests, as a task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from import_sources import write
from typer.testing import CliRunner

from contracts.artifacts import find_artifact
from contracts.store import open_store
from curation.tasks.importing.suite import suite_report
from tests.archives import extract
from triplane_dagster.cli.app import app

pytestmark = pytest.mark.slow
PACKAGE = "toolz==1.0.0"
RIGHT, WRONG = "func(v.__self__)", "func(v.__self__[:1])"
TASK = """
instruction: "merge_with drops values: merge_with(sum, {1: 1}, {1: 10}) must be {1: 11}. Repair toolz/dicttoolz.py."
tests:
  - toolz/tests/test_dicttoolz.py::TestDict::test_merge_with
  - toolz/tests/test_dicttoolz.py::TestCustomMapping::test_merge_with
  - toolz/tests/test_dicttoolz.py::test_merge_with_non_dict_mappings
  - toolz/tests/test_curried.py::test_merge_with
  - toolz/tests/test_itertoolz.py::test_groupby
hidden: [toolz/tests]
reference: fixed
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution. Skips only where there is no index to ask."""
    root = tmp_path_factory.mktemp("package")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "toolz"]
    done = subprocess.run(
        [*command, "-q", "-d", str(root), PACKAGE], capture_output=True, text=True, timeout=250, check=False
    )
    unreachable = (
        "No matching distribution",
        "Could not find a version",
        "Max retries",
        "Temporary failure in name resolution",
    )
    if done.returncode and any(sign in done.stderr for sign in unreachable):
        pytest.skip(f"no package index reachable: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    (archive,) = root.glob("*.tar.gz")
    extract(archive, root)
    return root / archive.name.removesuffix(".tar.gz")


def test_the_oracle_scores_1_noop_0_and_three_cheats_0(package: Path, tmp_path: Path) -> None:
    module = (package / "toolz/dicttoolz.py").read_text()
    assert module.count(RIGHT) == 1
    changes = {
        "task.yaml": TASK,
        "fixed/toolz/dicttoolz.py": module,
        "toolz/dicttoolz.py": module.replace(RIGHT, WRONG),
    }
    package.rename(tmp_path / "toolz")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write((tmp_path / "toolz").rename(tasks / "toolz"), changes)

    def triplane(*arguments: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["--store", str(tmp_path / "store"), "tasks", *arguments, "--json"])
        assert done.exit_code == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    made = triplane("import", str(tasks))
    assert made["broken"] == [] and made["tasks"] == 1
    suite = find_artifact(open_store(str(tmp_path / "store")), "task_suite", str(made["key"]))
    assert suite is not None
    assert [(cheat.cheat, cheat.solved) for cheat in suite_report(suite).cheats] == [
        ("exit_zero", False),
        ("skip_all", False),
        ("conftest_passes", False),
    ]
    assert triplane("run", "--agent", "oracle", "--suite", str(made["digest"]))["score"] == 1.0
    assert triplane("run", "--agent", "noop", "--suite", str(made["digest"]))["score"] == 0.0
