"""Suites written as SWE-bench rows and as Harbor folders, and read again: the same tasks, no leaks, nothing by half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from import_sources import ADD, DOUBLE, ZERO, clone, folder_task, row, rows_file
from typer.testing import CliRunner, Result
from with_client import with_client

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.store import Store, open_store
from contracts.suites import add_tasks
from contracts.tasks import Environment, Split, Task
from curation.errors import TaskError
from curation.tasks.agents import agent_named, play_suite
from curation.tasks.exporting.folder import new_folder
from curation.tasks.importing.dockerfile import read_dockerfile
from curation.tasks.importing.harbor import read_harbor
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from curation.tasks.inspect import suite_tasks
from curation.tasks.suite import TaskSuiteConfig, generate_tasks
from curation.verify import Verifier
from triplane_dagster.cli.app import app

pytestmark = pytest.mark.slow


def published(store: Store, tasks: Sequence[Task], key: str = "a") -> Artifact:
    with ArtifactWriter(store, "task_suite", key * 64, parents={}, config={}, code_version="1") as out:
        add_tasks(out, tasks)
        return out.commit(meta={"tasks": len(tasks)})


def import_of(source: Path, repos: Path | None, store: Store, address: str) -> Artifact:
    reading = read_source(source, repos)
    return with_client(address, lambda client: import_suite(reading, parse_shares([]), store, client))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Artifact:
    """An instance with an environment, a folder that does not name its failing tests, and a generated task."""
    root = tmp_path_factory.mktemp("sources")
    commit = clone(root / "pack")
    folder_task(root / "tasks" / "from=folder", deliverables="src/\n")
    environment = {"timeout_s": 20.0, "ini": {"xfail_strict": "true"}}
    rows = rows_file(root / "rows.jsonl", [row(commit, triplane_environment=environment, deliverables=["src/"])])
    read = [*read_source(rows).tasks, *read_source(root / "tasks").tasks]
    generated = generate_tasks(TaskSuiteConfig.of_count(8))[-1]
    assert generated.split is Split.UNSEEN
    return published(store, [replace(read[0], split=Split.GATE), *read[1:], generated])


def export(suite: Artifact, kind: str, out: Path) -> Result:
    arguments = ["--store", suite.store.url, "tasks", "export", "--suite", suite.ref.digest, "--format", kind, "--json"]
    return CliRunner().invoke(app, [*arguments, "--out", str(out)])


def exported(suite: Artifact, kind: str, out: Path) -> dict[str, Any]:
    done = export(suite, kind, out)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(suite: Artifact, kind: str, out: Path) -> str:
    """The one line that says why."""
    done = export(suite, kind, out)
    assert done.exit_code == 1 and not done.stdout
    (line,) = [each for each in done.stderr.splitlines() if not each.startswith("export reading")]
    return line


def names(task: Task) -> tuple[set[str], set[str]]:
    failing = set(task.meta["fail_to_pass"])
    return failing, set(task.tests) - failing


@pytest.mark.parametrize("kind", ["swebench", "harbor"])
def test_exported_suite_is_read_as_the_same_tasks(
    kind: str, suite: Artifact, store: Store, tmp_path: Path, envd_address: str
) -> None:
    out = tmp_path / "out"
    assert exported(suite, kind, out)["tasks"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing hidden is left"
    source, repos = (out / "instances.jsonl", out / "clones") if kind == "swebench" else (out, None)
    again = import_of(source, repos, store, envd_address)
    assert not suite_report(again).broken
    before, after = suite_tasks(suite), suite_tasks(again)
    assert before.keys() == after.keys()
    for name, task in before.items():
        found = after[name]
        assert (found.files, found.hidden_files) == (task.files, task.hidden_files), name
        assert (found.instruction, found.reference_diff) == (task.instruction, task.reference_diff), name
        assert (found.deliverables, found.environment) == (task.deliverables, task.environment), name
        assert set(found.tests) == set(task.tests), name
    assert names(after["acme__pack-1"]) == ({ADD}, {ZERO, DOUBLE})
    assert names(after["from=folder"]) == ({ADD}, {DOUBLE}), "found by a run without the fix"
    assert after["acme__pack-1"].split is Split.GATE
    (generated,) = (name for name, task in before.items() if task.split is Split.UNSEEN)
    assert after[generated].split is Split.HELD_OUT, "only generated suites have unseen tasks"
    tasks = list(after.values())
    for agent, solved in (("oracle", True), ("noop", False)):
        played = with_client(
            envd_address,
            lambda client, agent=agent: play_suite(tasks, agent_named(agent), client, Verifier(client, None)),
        )
        assert [each.verdict.solved for each in played] == [solved] * 3


def test_clone_of_an_exported_repository_has_no_tasks_files(suite: Artifact, tmp_path: Path) -> None:
    exported(suite, "swebench", tmp_path / "one")
    exported(suite, "swebench", tmp_path / "two")
    text = (tmp_path / "one" / "instances.jsonl").read_text()
    assert text == (tmp_path / "two" / "instances.jsonl").read_text(), "equal commits"
    rows = [json.loads(line) for line in text.splitlines()]
    assert {each["repo"] for each in rows} == {"acme/pack", f"triplane/suite-{suite.ref.short}"}
    source = tmp_path / "one" / "clones" / f"triplane__suite-{suite.ref.short}.git"
    assert sum(path.is_file() for path in source.rglob("objects/**/*"))
    subprocess.run(
        ["git", "clone", "--quiet", "--no-local", str(source), str(tmp_path / "copy")], check=True, capture_output=True
    )
    objects = ["git", "-C", str(tmp_path / "copy"), "cat-file", "--batch-all-objects", "--batch-check"]
    assert not subprocess.run(objects, check=True, capture_output=True).stdout


def run_script(script: Path, root: Path, folder: Path) -> None:
    """Run a script of a Harbor task with the container's folders below `root`."""
    text = script.read_text()
    for name, place in {
        "/workspace": root / "workspace",
        "/logs": root / "logs",
        "/tests": folder / "tests",
        "/solution": folder / "solution",
    }.items():
        text = text.replace(f"{name}/", f"{place}/").replace(f"{name}\n", f"{place}\n").replace(f"{name} ", f"{place} ")
    path = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{root}/workspace/src:{root}/workspace",
    }
    subprocess.run(["bash", "-c", text], check=True, env=path, capture_output=True)


def test_harbor_folder_hides_solution_and_tests_and_its_scripts_reward_the_fix_alone(
    suite: Artifact, tmp_path: Path
) -> None:
    exported(suite, "harbor", tmp_path / "out")
    for name, task in suite_tasks(suite).items():
        folder = tmp_path / "out" / name
        shown = {
            path.relative_to(folder / "environment"): path.read_bytes()
            for path in (folder / "environment").rglob("*")
            if path.is_file()
        }
        assert {path.as_posix() for path in shown} == {"Dockerfile", *(f"workspace/{each}" for each in task.files)}
        everything = b"".join(shown.values()) + (folder / "instruction.md").read_bytes()
        assert not any(data in everything for path, data in task.hidden_files.items() if path not in task.files)
        added = [line[1:] for line in task.reference_diff.split(b"\n") if line.startswith(b"+") and line[1:2] != b"+"]
        assert added and not any(line in everything for line in added)
        root = tmp_path / f"root-{name}"
        (root / "logs").mkdir(parents=True)
        for path, data in task.files.items():
            (root / "workspace" / path).parent.mkdir(parents=True, exist_ok=True)
            (root / "workspace" / path).write_bytes(data)
        for script, reward in (("tests/test.sh", "0"), ("solution/solve.sh", "0"), ("tests/test.sh", "1")):
            assert os.access(folder / script, os.X_OK)
            run_script(folder / script, root, folder)
            assert (root / "logs" / "verifier" / "reward.txt").read_text().strip() == reward, (name, script)


def test_existing_folder_and_a_suite_that_can_not_be_written_leave_everything_as_it_was(
    suite: Artifact, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    assert "full exists and is not empty: name a new folder with --out" in refused(suite, "harbor", tmp_path / "full")
    (task, *_) = suite_tasks(suite).values()
    latin = published(store, [replace(task, reference_diff=task.reference_diff + b"\xe9")], "b")
    assert "acme__pack-1: the patch of its fix is not UTF-8" in refused(latin, "swebench", tmp_path / "none")
    lost = published(store, [replace(task, environment=Environment(runtime="7" * 64))], "c")
    assert "runtime 777777777777 of its environment is not in" in refused(lost, "harbor", tmp_path / "none")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["full", "mine"]
    with pytest.raises(KeyError), new_folder(tmp_path / "half") as folder:
        (folder / "a").write_text("a")
        raise KeyError
    assert not (tmp_path / "half").exists()


def test_a_folder_replaces_the_one_that_a_link_names_but_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with new_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/a").read_text() == "a"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(TaskError, match="is the current folder"), new_folder(Path()):
        raise AssertionError("no work is done")


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for out in ("file/out", "loop"):
        with pytest.raises(TaskError, match=f"{out} can't be made .*--out"), new_folder(tmp_path / out):
            raise AssertionError("no work is done")


def test_a_mount_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    with pytest.raises(TaskError, match=r"is a mount, .* such as --out \S+/out/tasks"), new_folder(tmp_path / "out"):
        raise AssertionError("no work is done")
    with new_folder(tmp_path / "out" / "tasks") as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / "out" / "tasks" / "a").exists()


def harbor_task(root: Path, **changes: str) -> Path:
    """A small Harbor task as another project might write it."""
    files = {
        "task.toml": '[task]\nname = "acme/add"\n[environment]\nallow_internet = true\n',
        "instruction.md": "repair add\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nRUN apt-get update && \\\n    apt-get install -y git\n"
        "RUN pip install --no-cache-dir pytest==8.4.1\nWORKDIR /app\nCOPY calc.py ./\nCOPY more /app/more\n",
        "environment/calc.py": "def add(a, b):\n    return a - b\n",
        "environment/more/data.txt": "1\n",
        "solution/solve.sh": "#!/bin/bash\nset -e\ncd /app\npatch -p1 < /solution/fix.diff\n",
        "solution/fix.diff": "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n"
        "+    return a + b\n",
        "tests/test.sh": "#!/bin/bash\ncp /tests/files/* /app\npytest test_add.py && echo 1 > /logs/reward.txt\n",
        "tests/files/test_add.py": "from calc import add\n\n\ndef test_add():\n    assert add(1, 1) == 2\n",
        "tests/config.json": '{"FAIL_TO_PASS": "[\\"test_add.py::test_add\\"]"}',
    }
    for path, text in (files | changes).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_foreign_harbor_task_is_read_by_its_dockerfile(tmp_path: Path, envd_address: str) -> None:
    harbor_task(tmp_path / "tasks" / "add")
    harbor_task(tmp_path / "tasks" / "odd", **{"environment/Dockerfile": "FROM ubuntu:24.04\n"})
    made = import_of(tmp_path / "tasks", None, open_store(str(tmp_path / "store")), envd_address)
    (task,) = suite_tasks(made).values()
    assert (task.task_id, task.tests) == ("add", ("test_add.py::test_add",))
    assert task.files.keys() == {"calc.py", "more/data.txt"} and task.hidden_files.keys() == {"test_add.py"}
    (broken,) = suite_report(made).broken
    assert broken.task_id == "odd" and "FROM ubuntu:24.04" in broken.reason
    single = read_harbor(tmp_path / "tasks" / "add")
    assert [each.task_id for each in single.tasks] == ["add"]


BASE = "FROM python:3.12\nWORKDIR /app\nCOPY calc.py /app/\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment/Dockerfile": f"{BASE}RUN make install\n"}, "Dockerfile says `RUN make install`"),
        ({"environment/Dockerfile": f"{BASE}RUN curl x | sh\n"}, "Dockerfile says `RUN curl x | sh`"),
        ({"environment/Dockerfile": f"{BASE}RUN apt-get install -y gcc\n"}, "apt-get install -y gcc"),
        ({"environment/Dockerfile": f"{BASE}COPY --from=x a b\n"}, "COPY --from=x a b"),
        ({"environment/Dockerfile": f"{BASE}COPY\n"}, "Dockerfile says `COPY`"),
        ({"environment/Dockerfile": f'{BASE}COPY "a b /app\n'}, 'Dockerfile says `COPY "a b /app`'),
        ({"environment/Dockerfile": f"{BASE}RUN git\n"}, "Dockerfile says `RUN git`"),
        (
            {"environment/Dockerfile": f"{BASE}COPY calc.py /etc/\n"},
            "copies calc.py to /etc/calc.py, outside its WORKDIR",
        ),
        (
            {"environment/Dockerfile": f"{BASE}COPY calc.py /app/../x/\n"},
            "copies calc.py to /x/calc.py, outside its WORKDIR",
        ),
        ({"environment/Dockerfile": f"{BASE}COPY ../solution/fix.diff /app\n"}, "fix.diff, which is not there"),
        ({"environment/Dockerfile": f"{BASE}COPY gone /app\n"}, "copies gone, which is not there"),
        (
            {"environment/Dockerfile": f"{BASE}RUN pip install pytest numpy==2\n"},
            "installs numpy==2: packages need a runtime",
        ),
        ({"environment/Dockerfile": "WORKDIR /app\n"}, "has no FROM python:3"),
        ({"solution/solve.sh": "#!/bin/bash\nsed -i s/-/+/ calc.py\n"}, "runs `sed -i s/-/+/ calc.py`"),
        ({"solution/solve.sh": "#!/bin/bash\ngit apply other.patch\n"}, "applies no single patch beside it"),
        ({"tests/test.sh": "#!/bin/bash\ncargo test\n"}, "does not run pytest"),
        ({"tests/config.json": "{}"}, "tests/config.json is wrong at FAIL_TO_PASS"),
        ({"instruction.md": "\n"}, "its instruction is empty: say what"),
        ({"task.toml": "steps = [{name = 'a'}]\n"}, "asks for several steps"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "asks for GPUs"),
        ({"task.toml": "[environment\n"}, "task.toml is not TOML"),
        ({"task.toml": f"a = {'[' * 5000}{']' * 5000}\n"}, "task.toml is not TOML: maximum recursion depth"),
        ({"task.toml": "environment = 3\n"}, "task.toml is wrong at environment"),
        ({"environment/docker-compose.yaml": "services: {}\n"}, "several containers"),
    ],
)
def test_harbor_task_that_can_not_run_here_is_named_with_its_reason(
    changes: dict[str, str], said: str, tmp_path: Path
) -> None:
    harbor_task(tmp_path / "tasks" / "add", **changes)
    (broken,) = read_source(tmp_path / "tasks").broken
    assert broken.task_id == "add" and said in broken.reason and "\n" not in broken.reason


def test_harbor_task_without_a_part_is_named(tmp_path: Path) -> None:
    for part in ("environment/Dockerfile", "instruction.md", "solution/solve.sh", "tests/config.json"):
        folder = harbor_task(tmp_path / part.replace("/", "-") / "add")
        (folder / part).unlink()
        (broken,) = read_source(folder.parent).broken
        assert f"it has no {part}" in broken.reason


def test_a_dockerfile_whose_image_the_task_names_gives_its_files_alone() -> None:
    text = "ARG V=1\nFROM ubuntu:$V\nENV A=1\nRUN apt-get install -y gcc && x\nWORKDIR /app\nCOPY src /app\nUSER me\n"
    image = read_dockerfile(text, built=True)
    assert image.tree({"src/m.py": b"3", "Dockerfile": b""}) == {"m.py": b"3"} and image.packages == ()
    with pytest.raises(TaskError, match=r"ARG V=1.*name its image as the task's runtime"):
        read_dockerfile(text)
    with pytest.raises(TaskError, match="COPY --from=built"):
        read_dockerfile(text + "COPY --from=built a b\n", built=True)


def test_dockerfile_places_files_as_docker_does() -> None:
    image = read_dockerfile("FROM python:3.12\nWORKDIR /a\nWORKDIR b\nCOPY x y d/\nCOPY src .\nCOPY x z\n")
    context = {"x": b"1", "y": b"2", "src/m.py": b"3", "Dockerfile": b""}
    assert image.workdir == "/a/b"
    assert image.tree(context) == {"d/x": b"1", "d/y": b"2", "m.py": b"3", "z": b"1"}
    assert read_dockerfile("FROM python:3.12\nCOPY . /w\n", "/w").tree(context).keys() == {"x", "y", "src/m.py"}
