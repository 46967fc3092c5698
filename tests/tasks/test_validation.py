import asyncio
import dataclasses
from pathlib import Path

import pytest

from contracts.artifacts import Artifact, list_artifacts
from contracts.store import open_store
from contracts.tasks import Split, Task, read_tasks
from curation.errors import TaskError
from curation.tasks import build
from curation.tasks.build import build_suite
from curation.tasks.inspect import find_task, suite_tasks, task_rows, task_text
from curation.tasks.suite import TaskSuiteConfig, generate_tasks
from curation.tasks.validate import ValidationReport, validate_tasks
from envd.client import SandboxClient

CONFIG = TaskSuiteConfig(train=22, gate=2, held_out=3, unseen=6)
FEW = TaskSuiteConfig(train=1, gate=1, held_out=1, unseen=1)
"""Families take turns in every split, so this holds only the first of the trained and of the unseen ones; probing them
is quick.
"""


def _built(config: TaskSuiteConfig, address: str, folder: Path) -> Artifact:
    async def run() -> Artifact:
        async with SandboxClient(address) as client:
            return await build_suite(config, open_store(str(folder)), client)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def suite(envd_address: str, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return _built(CONFIG, envd_address, tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def few(envd_address: str, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return _built(FEW, envd_address, tmp_path_factory.mktemp("few"))


def _validate(tasks: list[Task], address: str) -> tuple[ValidationReport, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    async def run() -> ValidationReport:
        async with SandboxClient(address) as client:
            report, sound = await validate_tasks(tasks, client, lambda done, total: seen.append((done, total)))
            broken = {each.task_id for each in report.broken}
            assert [task.task_id for task in sound] == [task.task_id for task in tasks if task.task_id not in broken]
            return report

    return asyncio.run(run()), seen


@pytest.mark.slow
def test_a_built_suite_is_sound_and_for_each_family_three_cheats_and_all_other_operations_score_0(
    suite: Artifact,
) -> None:
    report = ValidationReport.model_validate(suite.json("validation.json"))
    assert report.tasks == 33
    assert report.broken == []
    assert len({(cheat.family, cheat.cheat) for cheat in report.cheats}) == len(report.cheats) == 28 * 3
    assert not [cheat for cheat in report.cheats if cheat.solved]
    assert report.wrong_answers == (8 + 8) * 7 + 12 * 11  # the other operations of inner and middle, of outer places
    assert suite.meta["splits"] == {"train": 22, "gate": 2, "held_out": 3, "unseen": 6}
    tasks = read_tasks(suite.table("tasks.parquet"))
    assert [dataclasses.replace(task, checks=None) for task in tasks] == generate_tasks(CONFIG)
    assert (report.decoys, report.observed, report.undecided) == (33, 33 * 3, {})
    for task in tasks:
        assert task.checks is not None and task.checks.observed is not None
        assert task.checks.decoys[0].tests == task.tests and task.checks.known == ()


@pytest.mark.slow
def test_building_again_elsewhere_gives_the_same_content(few: Artifact, envd_address: str, tmp_path: Path) -> None:
    assert _built(FEW, envd_address, tmp_path).ref.digest == few.ref.digest


def test_broken_tasks_are_named_with_their_reasons(envd_address: str) -> None:
    one_family = [task for task in generate_tasks(TaskSuiteConfig(train=84)) if task.family == "inner-plus"]
    good, *rest = one_family[:4]
    trivial = dict.fromkeys(rest[0].hidden_files, b"def test_small():\n    pass\n")
    broken = [
        dataclasses.replace(rest[0], hidden_files=trivial, tests=rest[0].tests[:1]),
        dataclasses.replace(rest[1], reference_diff=b""),
        dataclasses.replace(rest[2], tests=(*rest[2].tests, "tests/test_hidden.py::test_absent")),
    ]
    report, seen = _validate([good, *broken], envd_address)
    reasons = {task.task_id: task.reason for task in report.broken}
    assert set(reasons) == {task.task_id for task in broken}
    assert "pass before the fix" in reasons[rest[0].task_id]
    assert "do not pass after the fix" in reasons[rest[1].task_id]
    assert "1 missing" in reasons[rest[2].task_id]
    assert seen[-1][0] == seen[-1][1] == len(seen)


def test_a_suite_with_too_many_broken_tasks_is_refused_and_leaves_nothing(
    envd_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(config: TaskSuiteConfig) -> list[Task]:
        first, *rest = generate_tasks(config)
        return [dataclasses.replace(first, reference_diff=b""), *rest]

    monkeypatch.setattr(build, "generate_tasks", spoiled)
    store = open_store(str(tmp_path))

    with pytest.raises(TaskError, match=r"1 of 4 tasks are broken .* do not pass after the fix"):
        _built(FEW, envd_address, tmp_path)
    assert not list(list_artifacts(store))


def test_tasks_are_listed_and_shown_by_the_command(few: Artifact) -> None:
    assert len(task_rows(suite_tasks(few))) == 4
    tasks = suite_tasks(few, Split.GATE)
    rows = task_rows(tasks)
    assert len(rows) == 1
    assert task_rows(tasks, rows[0]["family"])
    task = find_task(tasks, rows[0]["task_id"][:-4])
    assert task.instruction in task_text(task)
    assert "reference fix" in task_text(task)
    with pytest.raises(TaskError, match="did you mean"):
        find_task(tasks, "no-such-task")
