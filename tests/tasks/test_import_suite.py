"""Tasks of one's own from source to verdict, in real sandboxes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from import_sources import ADD, DOUBLE, ZERO, clone, folder_task, row, rows_file, write
from typer.testing import CliRunner
from with_client import with_client

from contracts.artifacts import Artifact, list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store, open_store
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.agents import Played, agent_named, play_suite
from curation.tasks.build import build_suite, planned_key, suite_key
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from curation.tasks.inspect import suite_tasks
from curation.tasks.suite import ImportedSuiteConfig, TaskSuiteConfig
from curation.verify import Verifier
from resources.errors import ExperimentError
from resources.experiment import parse_experiment
from triplane_dagster.cli.app import app


def imported(source: Path, store: Store, address: str, *shares: str) -> Artifact:
    reading = read_source(source)
    return with_client(address, lambda client: import_suite(reading, parse_shares(shares), store, client))


def played(tasks: list[Task], agent: str, address: str) -> list[Played]:
    return with_client(address, lambda client: play_suite(tasks, agent_named(agent), client, Verifier(client, None)))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, store: Store, envd_address: str) -> Artifact:
    """Five rows of one clone, two of them unsound."""
    root = tmp_path_factory.mktemp("rows")
    commit = clone(root / "pack")
    rows = [
        row(commit, instance_id="sound-1"),
        row(commit, instance_id="sound-2", problem_statement="add is wrong", PASS_TO_PASS=[]),
        row(commit, instance_id="sound-3", problem_statement="repair add", split="held_out"),
        row(commit, instance_id="early", FAIL_TO_PASS=[ADD, ZERO]),
        row(commit, instance_id="missing", PASS_TO_PASS=["tests/test_double.py::test_gone"]),
        row(commit, instance_id="unfetched", base_commit="f" * 40),
    ]
    return imported(rows_file(root / "rows.jsonl", rows), store, envd_address, "train=0.5", "gate=0.5")


def test_unsound_tasks_are_named_and_left_out_and_every_task_is_probed(suite: Artifact) -> None:
    report = suite_report(suite)
    reasons = {each.task_id: each.reason for each in report.broken}
    assert set(reasons) == {"early", "missing", "unfetched"}
    assert f"{ZERO} is said to fail before the fix, and passes" in reasons["early"]
    assert "tests/test_double.py::test_gone does not pass after the fix: missing" in reasons["missing"]
    assert report.tasks == 6 and len(report.cheats) == 9 and not any(cheat.solved for cheat in report.cheats)
    splits = {task.task_id: task.split for task in suite_tasks(suite).values()}
    assert splits["sound-3"] is Split.HELD_OUT and {splits["sound-1"], splits["sound-2"]} == {Split.TRAIN, Split.GATE}


def test_a_test_that_passes_before_the_fix_makes_no_task_and_nothing_is_published(
    tmp_path: Path, envd_address: str
) -> None:
    about = f"instruction: x\ntests: [{DOUBLE!r}]\nhidden: [tests/unit]\nreference: fix.patch\n"
    folder_task(tmp_path / "tasks/easy", about)
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(TaskError, match=r"all 1 tasks are broken, .* first easy: its hidden tests pass before the fix"):
        imported(tmp_path / "tasks", store, envd_address)
    assert not list(list_artifacts(store))


def test_the_oracle_scores_1_noop_0_and_a_script_what_it_earns(
    suite: Artifact, envd_address: str, tmp_path: Path
) -> None:
    tasks = list(suite_tasks(suite).values())
    assert [each.verdict.solved for each in played(tasks, "oracle", envd_address)] == [True] * 3
    assert [each.verdict.solved for each in played(tasks, "noop", envd_address)] == [False] * 3
    script = write(tmp_path, {"agent.py": SCRIPT}) / "agent.py"
    solved = {each.task.task_id: (each.verdict.solved, each.turns) for each in played(tasks, str(script), envd_address)}
    assert solved == {"sound-1": (True, 2), "sound-2": (False, 0), "sound-3": (False, 0)}


SCRIPT = """
def act(observation):
    if observation.instruction != "add subtracts":
        return []
    if not observation.turns:
        return [{"name": "read", "arguments": {"path": "src/pack/calc.py"}}]
    if len(observation.turns) == 1 and "a - b" in observation.turns[0].results[0].text:
        return [{"name": "edit", "arguments": {"path": "src/pack/calc.py", "old": "a - b", "new": "a + b"}}]
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("x = 1\n", "has no plain function `act`"),
        ("import nosuchmodule\n", "can't be loaded: ModuleNotFoundError"),
        ("def act(observation):\n    return [3]\n", "act returned 3: return a list"),
        ("def act(observation):\n    return 3\n", "act returned 3: return a list"),
        ("def act(observation):\n    raise KeyError('k')\n", "failed at task sound-1, turn 0: KeyError"),
    ],
)
def test_a_wrong_script_is_named_with_its_fault(
    script: str, said: str, suite: Artifact, envd_address: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {"agent.py": script}) / "agent.py"
    task = suite_tasks(suite)["sound-1"]
    with pytest.raises(TaskError, match=said):
        played([task], str(path), envd_address)


def test_an_experiment_takes_an_imported_suite_by_digest(suite: Artifact, store: Store, envd_address: str) -> None:
    config = ImportedSuiteConfig(kind="import", suite=suite.ref.digest[:12])
    found = with_client(envd_address, lambda client: build_suite(config, store, client))
    assert found.ref == suite.ref and planned_key(config, store) == suite.ref.key
    unknown = ImportedSuiteConfig(kind="import", suite="0" * 12)
    with pytest.raises(ArtifactMissing, match=r"'0{12}' matches 0 task suites .*`triplane tasks import`"):
        with_client(envd_address, lambda client: build_suite(unknown, store, client))
    own = parse_experiment({"name": "own", "tasks": {"kind": "import", "suite": suite.ref.digest}})
    assert own.demonstrated == parse_experiment({"name": "one"}).demonstrated, "it has a tokenizer, too"
    with pytest.raises(ExperimentError, match=r"tasks\.suite = 'xyz'"):
        parse_experiment({"name": "own", "tasks": {"kind": "import", "suite": "xyz"}})


def test_key_of_a_generated_suite_is_unchanged() -> None:
    assert parse_experiment({"name": "one"}).model_dump()["tasks"] == TaskSuiteConfig().model_dump()
    assert suite_key(TaskSuiteConfig()) == "6f39db33b7078317e8fcae8fb86133b56986fdc31819584f1accf2bb598bd451"
    with pytest.raises(ExperimentError, match=r"tasks\.trian is not a field: did you mean train"):
        parse_experiment({"name": "one", "tasks": {"trian": 3}})


def test_the_command_imports_runs_and_lists(tmp_path: Path) -> None:
    folder_task(tmp_path / "tasks/adds")
    folder_task(tmp_path / "tasks/torn", "a: [")

    def triplane(*arguments: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(
            app, ["--store", str(tmp_path / "store"), "tasks", *arguments], env={"TRIPLANE_DEBUG": ""}
        )
        return done.exit_code, done.stdout, done.stderr

    made = json.loads(triplane("import", str(tmp_path / "tasks"), "--json")[1])
    assert [each["task_id"] for each in made["broken"]] == ["torn"] and made["splits"]["train"] == 1
    digest = made["digest"][:12]
    scored = json.loads(triplane("run", "--agent", "oracle", "--suite", digest, "--json")[1])
    assert scored["score"] == 1 and scored["tasks"][0]["tests"] == "2/2"
    (listed,) = json.loads(triplane("list", "--suite", digest, "--json")[1])
    assert (listed["task_id"], listed["family"]) == ("adds", "tasks")
    code, _, said = triplane("run", "--agent", "human", "--suite", digest)
    assert code == 1 and "no agent 'human': use oracle, noop" in said and said.count("\n") == 1
