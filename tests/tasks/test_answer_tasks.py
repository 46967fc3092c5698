"""Tasks whose final state is no diff, from their folder to the verdict, in real sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from import_sources import write
from with_client import with_client

from contracts.store import open_store
from contracts.tasks import Task
from curation.tasks.agents import agent_named, play_suite
from curation.tasks.exporting.prepare import prepare
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from curation.tasks.inspect import suite_tasks, task_text
from curation.tasks.validate import validate_tasks
from curation.verify import Verifier
from envd.client import SandboxClient, ToolCall

LOG = "alice 3\nbob 4\nalice 5\n"
SECRET = "quokka-7731"
ANSWERS = {
    "sum": "instruction: Sum the numbers in log.txt.\nfinal_state: {kind: answer, rule: number, expected: 12}\n",
    "names": (
        "instruction: Sum the numbers in log.txt by name, as an object.\nhidden: [notes.txt]\n"
        "final_state: {kind: answer, rule: json, expected: {alice: 8, bob: 4}}\n"
    ),
    "word": f"instruction: Which word?\nfinal_state: {{kind: answer, rule: normalized, expected: {SECRET}}}\n",
}


def folders(root: Path, about: dict[str, str]) -> Path:
    for name, text in about.items():
        write(root / name, {"task.yaml": text, "log.txt": LOG} | ({} if name == "word" else {"notes.txt": SECRET}))
    return root


def solved(tasks: list[Task], agent: str, address: str) -> list[bool]:
    async def job(client: SandboxClient) -> list[bool]:
        played = await play_suite(tasks, agent_named(agent), client, Verifier(client, None))
        return [each.verdict.solved for each in played]

    return with_client(address, job)


def test_a_suite_of_answers_is_imported_proved_shown_and_played(tmp_path: Path, envd_address: str) -> None:
    reading, store = read_source(folders(tmp_path / "tasks", ANSWERS)), open_store(str(tmp_path / "store"))
    assert not reading.broken and all(task.toolset == "answer" and not task.checks for task in reading.tasks)
    suite = with_client(envd_address, lambda client: import_suite(reading, parse_shares([]), store, client))
    assert not suite_report(suite).broken and len(suite_report(suite).cheats) == 4 * len(ANSWERS)
    tasks = suite_tasks(suite)
    assert {name: task.digest for name, task in tasks.items()} == {task.task_id: task.digest for task in reading.tasks}
    assert '--- final state: {"expected": 12, "kind": "answer", "rule": "number"}' in task_text(tasks["sum"])
    assert solved(list(tasks.values()), "oracle", envd_address) == [True] * 3
    assert solved(list(tasks.values()), "noop", envd_address) == [False] * 3
    report, sound = with_client(envd_address, lambda client: validate_tasks(list(tasks.values()), client))
    assert (report.broken, sound) == ([], list(tasks.values()))


@pytest.mark.slow
def test_the_expected_answer_is_nowhere_in_the_sandbox_of_its_agent(tmp_path: Path, envd_address: str) -> None:
    (task,) = read_source(folders(tmp_path / "tasks", {"word": ANSWERS["word"]})).tasks
    search = (
        f"grep -rsIl '{SECRET[:6]}[-]{SECRET[7:]}' /workspace /tmp /etc /home /root;"
        f" git log -p --all | grep -c '{SECRET[:6]}[-]{SECRET[7:]}';"
        " env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; ls -R /workspace"
    )

    async def job(client: SandboxClient) -> str:
        template = await client.put_template(task.files)
        async with await client.create(template, toolset=task.toolset) as sandbox:
            planting = ToolCall("exec", {"command": f"echo {SECRET} > f; {search}; rm f"})
            planted = await sandbox.call(planting, timeout_s=60)
            assert planted.text.startswith("/workspace/f\n"), "the search finds what is there"
            return (await sandbox.call(ToolCall("exec", {"command": search}), timeout_s=60)).text

    said = with_client(envd_address, job)
    assert SECRET not in said and said.startswith("0\n") and "task.yaml" not in said


FAULTS = {
    "tests": (
        ANSWERS["sum"] + "tests: [a.py::t]\n",
        "its final state is of kind answer, which has no tests: remove it",
    ),
    "reference": (ANSWERS["sum"] + "reference: log.txt\n", "which has no reference"),
    "deliverables": (ANSWERS["sum"] + "deliverables: [a]\n", "which has no deliverables"),
    "rule": ("instruction: x\nfinal_state: {kind: answer, rule: exact, expected: 4}\n", "quote it"),
    "kind": ("instruction: x\nfinal_state: {kind: feeling}\n", "'diff', 'answer'"),
    "no reference": ("instruction: x\ntests: [a.py::t]\n", "names no reference"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_final_state_that_is_wrong_is_named_with_its_reason(fault: str, tmp_path: Path) -> None:
    text, reason = FAULTS[fault]
    reading = read_source(folders(tmp_path, {"wrong": text}))
    (broken,) = reading.broken
    assert reason in broken.reason and not reading.tasks


def test_a_task_whose_instruction_is_its_answer_is_left_out(tmp_path: Path, envd_address: str) -> None:
    about = "instruction: Say yes\nfinal_state: {kind: answer, rule: normalized, expected: say  YES}\n"
    tasks = read_source(folders(tmp_path, {"easy": about})).tasks
    report, sound = with_client(envd_address, lambda client: validate_tasks(tasks, client))
    assert [each.reason for each in report.broken] == ["the cheat instruction passes its tests"] and not sound


def test_a_format_that_can_not_hold_a_final_state_leaves_the_task_out(tmp_path: Path) -> None:
    tasks = read_source(folders(tmp_path, {"sum": ANSWERS["sum"]})).tasks
    found, (broken,) = asyncio.run(prepare(tasks, "suite", Verifier(SandboxClient("unix:/nowhere"), None)))
    assert not found and "a final state other than a diff, which the format can't hold" in broken.reason
