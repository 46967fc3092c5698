"""Components that need nobody else: their values, their sum, and that the default configuration is what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_rows import TASK, Bench, call, episode, grade, rollouts

from contracts.digests import digest_of
from contracts.episodes import ToolCallRecord
from contracts.store import LocalStore
from curation.rewards import EVIDENCE, REWARDS, RewardConfig
from curation.rewards.shapers import overlong
from curation.rewards.summary import component_summaries
from curation.rewards.traces import RULES, RuleName, read_calls, rule_table
from envd.client import VerifyResult


def configured(*components: dict[str, Any], **usual: Any) -> RewardConfig:
    return RewardConfig.model_validate({**usual, "components": components})


def test_the_default_configuration_has_the_form_and_the_slice_it_always_had() -> None:
    config = RewardConfig()
    assert config.model_dump(mode="json") == config.slice() == {"solved": 1.0, "valid": 0.1, "max_ungraded": 0.05}
    assert digest_of(config.slice()) == "7c562d8f7db9cd169e0de41e0de897eac97a539e257111382c83bc65d76b6cdd"


def test_a_reward_is_the_weighted_sum_of_clipped_values_and_each_is_kept(tmp_path: Path) -> None:
    config = configured(
        {"kind": "tests", "name": "share", "weight": 0.5},
        {"kind": "turns", "name": "turns", "weight": 0.25, "free": 1, "clip_low": -1.0},
        {"kind": "trace", "name": "rash", "weight": -2.0, "rule": "edits_tests"},
        {"kind": "format", "name": "form", "weight": 0.0},
    )
    store = LocalStore(tmp_path)
    changes_tests = [call("edit", path="./tests//test_app.py", new="")]
    graded = grade(store, rollouts(store, [episode("a", b"half"), episode("b", calls=changes_tests)]), config)
    assert graded.rewards.schema == REWARDS and graded.evidence.schema == EVIDENCE
    first, second = graded.rewards.to_pylist()
    assert {part["name"]: part["value"] for part in first["components"]} == pytest.approx(
        {"solved": 0.0, "valid": 0.1, "share": 0.25, "turns": -0.25, "rash": 0.0, "form": 0.0}
    )
    assert first["reward"] == pytest.approx(0.1 + 0.25 - 0.25)
    assert second["reward"] == pytest.approx(1.0 + 0.1 + 0.5 - 0.25 - 2.0)
    lines = {(line["episode_id"], line["component"]): line for line in graded.evidence.to_pylist()}
    assert len(lines) == 8
    turns = lines["a", "turns"]
    assert (turns["raw"], turns["value"], turns["reason"]) == (-2.0, -1.0, "3 turns, 1 free")
    assert lines["b", "rash"]["reason"] == "changed tests/test_app.py"
    summary = {each.name: each for each in component_summaries(graded.rewards, graded.evidence, config)}
    assert (summary["share"].mean, summary["share"].std, summary["share"].nonzero) == (0.75, 0.25, 1.0)
    assert (summary["rash"].nonzero, summary["solved"].mean, summary["valid"].mean) == (0.5, 0.5, 1.0)


def test_component_with_weight_0_is_recorded_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    played = rollouts(store, [episode("a", b"half")])
    plain = grade(store, played, RewardConfig())
    watched = grade(store, played, configured({"kind": "tests", "name": "share", "weight": 0}))
    assert watched.rewards["reward"].to_pylist() == plain.rewards["reward"].to_pylist()
    assert watched.evidence["value"].to_pylist() == [0.5] and plain.evidence.num_rows == 0


@settings(deadline=None)
@given(length=st.integers(0, 10_000), budget=st.integers(1, 5_000), data=st.data())
def test_the_length_penalty_is_dapos_equation_13(length: int, budget: int, data: st.DataObject) -> None:
    cushion = data.draw(st.integers(1, budget))
    value = overlong(length, budget, cushion)
    if length <= budget - cushion:
        assert value == 0
    elif length <= budget:
        assert value == ((budget - cushion) - length) / cushion
    else:
        assert value == -1


READ, EDIT = call("read", path="app.py"), call("edit", path="app.py", new="y")
PYTEST = call("exec", command="cd src && python3 -m pytest -q tests")


@pytest.mark.parametrize(
    ("rule", "calls", "value"),
    [
        ("read_before_edit", [READ, EDIT], 1.0),
        ("read_before_edit", [EDIT, READ, EDIT], 0.5),
        ("read_before_edit", [call("read", False, path="app.py"), EDIT], 0.0),
        ("read_before_edit", [call("write", path="new.py", content="")], 1.0),
        ("read_before_edit", [READ], 0.0),
        ("read_before_edit", [call("edit", path="/workspace/app.py", new="y")], 0.0),
        ("read_before_edit", [call("edit", path="tests/../app.py", new="y")], 0.0),
        ("read_before_edit", [call("read", path="/workspace/./app.py"), EDIT], 1.0),
        ("read_before_edit", [call("read", path="/app.py"), EDIT], 1.0),
        ("repeated_calls", [READ, READ, READ, EDIT], 0.5),
        ("repeated_calls", [READ, EDIT, READ], 0.0),
        ("repeated_calls", [READ, PYTEST, READ], 0.0),
        ("repeated_calls", [PYTEST, PYTEST], 0.5),
        ("repeated_calls", [READ, call("read", path="other.py")], 0.0),
        ("repeated_calls", [], 0.0),
        ("failed_calls", [READ, call("edit", False, path="app.py", new="")], 0.5),
        ("edits_tests", [call("write", path="conftest.py", content="")], 1.0),
        ("edits_tests", [call("edit", path="pkg/sums_test.py", new="")], 1.0),
        ("edits_tests", [call("edit", False, path="tests/test_app.py", new=""), EDIT], 0.0),
        ("edits_tests", [call("read", path="tests/test_app.py"), call("edit", path="latest.py", new="")], 0.0),
        ("ran_tests", [PYTEST, EDIT], 1.0),
        ("ran_tests", [call("exec", command="echo pytest; cat pytest.ini"), EDIT], 0.0),
        ("ran_tests", [call("exec", command="PYTHONPATH=. .venv/bin/pytest -x")], 1.0),
        ("tested_last_edit", [PYTEST, EDIT], 0.0),
        ("tested_last_edit", [EDIT, PYTEST, READ], 1.0),
        ("tested_last_edit", [PYTEST], 0.0),
    ],
)
def test_a_rule_counts_what_its_name_says(rule: RuleName, calls: list[ToolCallRecord], value: float) -> None:
    assert RULES[rule](read_calls([vars(each) for each in calls]), TASK).value == value


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            ToolCallRecord,
            st.integers(0, 5),
            st.sampled_from(["read", "edit", "exec", "list", "nonsense"]),
            st.sampled_from(['{"path": "app.py"}', '{"path": 3}', "{}", "[1]", "not json", '{"command": ["x"]}']),
            st.booleans(),
            st.text(max_size=3),
        ),
        max_size=12,
    )
)
def test_every_rule_has_a_value_from_0_to_1_whatever_was_called(calls: list[ToolCallRecord]) -> None:
    for rule in RULES.values():
        rating = rule(read_calls([vars(each) for each in calls]), TASK)
        assert rating.value is not None and 0 <= rating.value <= 1 and rating.reason


def test_every_rule_that_a_file_may_name_exists_and_says_what_it_counts() -> None:
    assert set(get_args(RuleName)) == set(RULES)
    assert all(len(row["counts"]) > 20 for row in rule_table())


def test_grading_with_shapers_verifies_each_final_state_once(tmp_path: Path) -> None:
    store, bench = LocalStore(tmp_path), Bench()
    played = rollouts(store, [episode(str(index)) for index in range(6)])
    grade(store, played, configured({"kind": "tests", "name": "share", "weight": 1}), bench)
    grade(store, played, configured({"kind": "tests", "name": "share", "weight": 2}), bench)
    assert bench.verified == 2, "as written, and repeated"


class Alone(Bench):
    """As Bench, but the passed test of "half" fails without the failed one; of "half forged" it tampers then."""

    async def verify(
        self, template: str, diff: bytes, hidden_files: Mapping[str, bytes], tests: Sequence[str], **limits: Any
    ) -> VerifyResult:
        if len(tests) == len(TASK.tests):
            return await super().verify(template, diff, hidden_files, tests, **limits)
        found = await super().verify(template, b"right" if diff.endswith(b"forged") else b"wrong", hidden_files, tests)
        return replace(found, tampering=("patched:builtins.len",) if diff.endswith(b"forged") else ())


def test_passed_tests_of_an_unsolved_state_are_confirmed_if_a_component_pays_for_them(tmp_path: Path) -> None:
    store, bench = LocalStore(tmp_path), Alone()
    played = rollouts(store, [episode("a", b"half"), episode("b", b"half forged"), episode("c")])
    share = {"kind": "tests", "name": "share", "weight": 1.0}
    believed = grade(store, played, configured({"kind": "format", "name": "form", "weight": 0.0}), bench).rewards
    assert (believed["tests_passed"].to_pylist(), bench.verified) == ([1, 1, 2], 4)
    graded = grade(store, played, configured(share), bench)
    assert graded.rewards["tests_passed"].to_pylist() == [0, 0, 2]
    assert graded.rewards["verdict"].to_pylist() == ["completed", "tampered", "completed"]
    assert graded.rewards["reward"].to_pylist() == pytest.approx([0.1, 0.0, 1.0 + 0.1 + 1.0])
    assert graded.rewards["findings"].to_pylist() == [[], ["patched:builtins.len"], []]
    assert graded.evidence["value"].to_pylist() == [0.0, 0.0, 1.0] and bench.verified == 6
