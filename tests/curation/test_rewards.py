import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import curation.runs
from contracts.digests import table_digest
from contracts.episodes import EPISODES
from contracts.tasks import Checks, Split, Task
from curation.errors import GradingIncomplete, RewardsMismatch
from curation.findings import finding
from curation.rewards import FLIPS, REWARDS, RewardConfig, flips, grade_episodes, is_valid, reward_row
from curation.verdicts import TestVerdict, Verdict
from curation.verify import Verifier
from envd.client import SandboxClient, TestOutcome, VerifyResult
from envd.errors import ServerUnavailable

TASK = Task("t", "sum", Split.TRAIN, "fix", {"app.py": b""}, {}, ("test_a",), b"", {}, checks=Checks(None, ()))
EDIT = {"turn": 1, "name": "edit", "arguments": "{}", "ok": True, "result": "ok"}
CONFIG = RewardConfig(solved=1.0, valid=0.25)


def episode(name: str = "e", **changes: Any) -> dict[str, Any]:
    return {
        "episode_id": name,
        "group_id": "g",
        "task_id": "t",
        "task_digest": TASK.digest,
        "outcome": "completed",
        "tool_calls": [EDIT],
        "format_errors": 0,
        "final_diff": b"right",
        **changes,
    }


def verdict(solved: bool) -> Verdict:
    status = "passed" if solved else "failed"
    return Verdict(solved=solved, exit="completed", tests=[TestVerdict(name="test_a", status=status, message="")])


class Faulty(SandboxClient):
    """Solves the diff "right", fails the diff "wrong", and is out of order for the diff "fault"."""

    def __init__(self) -> None:
        super().__init__("unix:/nowhere")

    async def put_template(self, files: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> str:
        return "template"

    async def verify(
        self, template: str, diff: bytes, hidden_files: Mapping[str, bytes], tests: Sequence[str], **limits: Any
    ) -> VerifyResult:
        if diff in (b"fault", b""):  # the control state, too
            raise ServerUnavailable("gone")
        return VerifyResult(
            (TestOutcome("test_a", "passed" if diff == b"right" else "failed", ""),), "completed", "", 0.0
        )


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curation.runs, "BACKOFF_S", 0.001)


def grade(rows: list[dict[str, Any]], config: RewardConfig = CONFIG, tasks: list[Task] | None = None) -> pa.Table:
    seen: list[tuple[int, int]] = []

    async def run() -> pa.Table:
        table = pa.Table.from_pylist(rows, schema=EPISODES)
        suite = {task.task_id: task for task in ([TASK] if tasks is None else tasks)}
        return await grade_episodes(table, suite, Verifier(Faulty(), None), config, lambda *counts: seen.append(counts))

    graded = asyncio.run(run())
    assert seen == [(done, len(rows)) for done in range(1, len(rows) + 1)]
    return graded


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"tool_calls": [EDIT | {"name": "write"}]}, True),
        ({"tool_calls": [EDIT | {"ok": False}, EDIT]}, True),
        ({"tool_calls": [EDIT | {"ok": False}]}, False),
        ({"tool_calls": [EDIT | {"name": "read"}]}, False),
        ({"tool_calls": []}, False),
        ({"format_errors": 1}, False),
        ({"outcome": "truncated"}, False),
        ({"outcome": "timed_out"}, False),
        ({"outcome": "format_error"}, False),
    ],
)
def test_valid_means_ended_by_itself_with_an_edit_that_took_and_no_format_error(changes: Any, valid: bool) -> None:
    assert is_valid(episode(**changes)) is valid


@settings(deadline=None)
@given(solved=st.booleans(), edited=st.booleans(), weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)))
def test_a_reward_is_the_sum_of_its_recorded_components(
    solved: bool, edited: bool, weights: tuple[float, float]
) -> None:
    config = RewardConfig(solved=weights[0], valid=weights[1])
    row = reward_row(episode(tool_calls=[EDIT] * edited), verdict(solved), config)
    assert row["reward"] == weights[0] * solved + weights[1] * edited
    assert {part["name"]: part["value"] for part in row["components"]} == {
        "solved": weights[0] * solved,
        "valid": weights[1] * edited,
    }


@pytest.mark.parametrize(
    ("found", "reward"),
    [
        (verdict(False), 0.25),
        (Verdict(solved=False, exit="timed_out", tests=[]), 0.25),
        (Verdict(solved=False, exit="ungradable", tests=[]), 0.0),
        (Verdict(solved=False, exit="completed", tests=[], findings=(finding("observed:test_a"),)), 0.0),
    ],
)
def test_a_state_that_tampers_or_cannot_be_graded_earns_nothing(found: Verdict, reward: float) -> None:
    assert reward_row(episode(), found, CONFIG)["reward"] == reward


def test_every_episode_gets_a_row_in_order_and_an_infrastructure_error_is_null_not_zero() -> None:
    rows = [
        episode("a", final_diff=b"wrong"),
        episode("b", outcome="infra_error"),
        episode("c"),
        episode("d", outcome="aborted"),
        episode("e", final_diff=b"fault"),
        episode("f", outcome="truncated"),
    ]
    graded = grade(rows, RewardConfig(valid=0.25, max_ungraded=0.2))
    assert graded.schema == REWARDS
    assert graded["episode_id"].to_pylist() == ["a", "b", "c", "d", "e", "f"]
    assert graded["reward"].to_pylist() == [0.25, None, 1.25, None, None, 1.0]
    assert graded["solved"].to_pylist() == [False, None, True, None, None, True]
    verdicts = ["completed", "infra_error", "completed", "aborted", "not_graded", "completed"]
    assert graded["verdict"].to_pylist() == verdicts
    assert graded["tests_passed"].to_pylist() == [0, 0, 1, 0, 0, 1]


def test_a_broken_verifier_fails_the_step_instead_of_leaving_a_remainder() -> None:
    rows = [episode(str(index), final_diff=b"fault" if index < 2 else b"right") for index in range(20)]
    with pytest.raises(GradingIncomplete, match=r"2 of 20 episodes.*max_ungraded=0.05.*run the same step again"):
        grade(rows)


@pytest.mark.parametrize(
    ("tasks", "says"),
    [
        ([], "which this suite lacks"),
        (
            [Task("t", "sum", Split.TRAIN, "other words", {}, {}, ("test_a",), b"", {})],
            "has changed since episode e",
        ),
    ],
)
def test_episodes_of_another_suite_are_refused(tasks: list[Task], says: str) -> None:
    with pytest.raises(RewardsMismatch, match=says):
        grade([episode()], tasks=tasks)


def test_no_episodes_give_no_rewards() -> None:
    assert grade([]).num_rows == 0


def test_flips_name_every_reward_that_another_grading_changed() -> None:
    old = grade([episode("a"), episode("b", final_diff=b"wrong"), episode("c"), episode("d", outcome="infra_error")])
    new = grade([episode("d"), episode("c"), episode("b"), episode("a")])
    found = flips(old, new)
    assert found.schema == FLIPS
    assert [(row["episode_id"], row["old_reward"], row["new_reward"]) for row in found.to_pylist()] == [
        ("b", 0.25, 1.25),
        ("d", None, 1.25),
    ]
    assert flips(old, old).num_rows == 0


def test_flips_name_a_changed_verdict_that_changes_no_reward() -> None:
    old = grade([episode("a", final_diff=b"wrong"), episode("b", final_diff=b"wrong")])
    rows = old.to_pylist()
    rows[0]["verdict"], rows[0]["findings"] = "tampered", ["spoof:conftest"]
    found = flips(old, pa.Table.from_pylist(rows, schema=REWARDS)).to_pylist()
    assert [(row["episode_id"], row["old_verdict"], row["new_verdict"]) for row in found] == [
        ("a", "completed", "tampered")
    ]


def test_grading_twice_gives_the_same_content() -> None:
    rows = [episode(str(index), final_diff=[b"right", b"wrong"][index % 2]) for index in range(40)]
    assert table_digest(grade(rows)) == table_digest(grade(rows))
