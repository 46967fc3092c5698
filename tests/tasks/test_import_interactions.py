"""Recorded conversations become tasks when the change that was kept, and tests, prove them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from import_sources import ADD, DOUBLE, PATCH, TEST_PATCH, clone, row, rows_file

from contracts.store import open_store
from contracts.tasks import read_tasks
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from envd.client import SandboxClient

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "add() subtracts."},
    {"role": "user", "content": [{"type": "text", "text": "Please fix it."}]},
    {"role": "assistant", "content": "Done, but I broke it."},
    {"role": "user", "content": "yes, do that"},
]


def interaction(commit: str, **changes: Any) -> dict[str, Any]:
    return {
        "interaction_id": "chat-1",
        "repo": "acme/pack",
        "base_commit": commit,
        "messages": MESSAGES,
        "accepted_patch": PATCH,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": [ADD],
        "PASS_TO_PASS": [DOUBLE],
        "user": "not read",
        **changes,
    }


@pytest.fixture
def commit(tmp_path: Path) -> str:
    return clone(tmp_path / "pack")


def test_a_conversation_is_told_up_to_the_first_answer_and_keeps_only_its_digest(tmp_path: Path, commit: str) -> None:
    reading = read_source(rows_file(tmp_path / "chats.jsonl", [interaction(commit)]))
    (task,) = reading.tasks
    assert (task.task_id, task.instruction) == ("chat-1", "add() subtracts.\n\nPlease fix it.")
    assert task.reference_diff == PATCH.encode() and task.tests == (ADD, DOUBLE)
    assert len(task.meta["conversation"]) == 64
    assert "broke it" not in str(task) and "yes, do that" not in str(task)


def test_environment_of_an_interaction_is_kept(tmp_path: Path, commit: str) -> None:
    told = interaction(commit, triplane_environment={"timeout_s": 20, "plugins": ["pack.plugin"]})
    (task,) = read_source(rows_file(tmp_path / "chats.jsonl", [told])).tasks
    assert task.environment.to_values() == {"timeout_s": 20, "plugins": ["pack.plugin"]}


def test_an_instruction_of_its_own_replaces_the_opening(tmp_path: Path, commit: str) -> None:
    told = interaction(commit, instruction="make add() add", messages=[MESSAGES[3]])
    (task,) = read_source(rows_file(tmp_path / "chats.jsonl", [told])).tasks
    assert task.instruction == "make add() add"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"accepted_patch": ""}, "accepted_patch is empty: only a change that was kept"),
        ({"messages": MESSAGES[3:]}, "no user message comes before"),
        ({"messages": "hello"}, "interaction is wrong at messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "interaction is wrong"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"repo": "acme/other"}, "holds no clone of acme/other"),
    ],
)
def test_an_interaction_that_proves_nothing_is_left_out_by_name(
    tmp_path: Path, commit: str, changes: dict[str, Any], reason: str
) -> None:
    rows = [interaction(commit, **changes), row(commit)]
    reading = read_source(rows_file(tmp_path / "chats.jsonl", rows))
    assert [task.task_id for task in reading.tasks] == ["acme__pack-1"]
    assert [each.task_id for each in reading.broken] == ["chat-1"] and reason in reading.broken[0].reason


def test_meta_of_a_swe_bench_row_is_unchanged(tmp_path: Path, commit: str) -> None:
    (task,) = read_source(rows_file(tmp_path / "rows.jsonl", [row(commit)])).tasks
    assert set(task.meta) == {"repo", "base_commit", "fail_to_pass", "pass_to_pass", "path"}


def test_interactions_are_proved_in_sandboxes_like_any_task(tmp_path: Path, commit: str, envd_address: str) -> None:
    unproved = interaction(commit, interaction_id="chat-2", FAIL_TO_PASS=[DOUBLE], PASS_TO_PASS=[])
    reading = read_source(rows_file(tmp_path / "chats.jsonl", [interaction(commit), unproved]))
    store = open_store(str(tmp_path / "store"))

    async def run() -> Any:
        async with SandboxClient(envd_address) as client:
            return await import_suite(reading, parse_shares([]), store, client)

    suite = asyncio.run(run())
    assert [task.task_id for task in read_tasks(suite.table("tasks.parquet"))] == ["chat-1"]
    (broken,) = suite_report(suite).broken
    assert broken.task_id == "chat-2" and "pass" in broken.reason
