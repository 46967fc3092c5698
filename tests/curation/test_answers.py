"""Answers are compared by the rule of their task, whatever an agent submits."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.final_states import AnswerState, answer_bytes, answer_in, final_answer
from contracts.tasks import Split, Task, read_tasks, tasks_table
from curation.rewards.grading import is_valid
from curation.states.answer import grade_answer
from curation.verify import Verifier
from envd.client import SandboxClient

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def is_right(answer: Any, rule: str, expected: Any, **tolerance: float) -> bool:
    state = AnswerState.model_validate({"rule": rule, "expected": expected, **tolerance})
    (outcome,) = grade_answer(state, answer_bytes(answer)).outcomes
    return outcome.status == "passed"


@pytest.mark.parametrize(
    ("rule", "expected", "right", "wrong"),
    [
        ("exact", "Basel", ["Basel"], ["basel", " Basel", "Basel.", ["Basel"], None]),
        ("normalized", "Straße  nach Basel", ["strasse nach\nBASEL "], ["strasse nach", "", {"a": "strasse"}]),
        ("normalized", "12", ["12", "１２"], [12, "12.0"]),
        ("number", 42, [42, 42.0, "42", " 4.2e1 "], [True, "42 apples", "nan", "1e999", "9" * 5000, [42], 43, None]),
        ("number", 2**53, [2**53, str(2**53)], [2**53 + 1, str(2**53 + 1), 10**400]),
        ("json", {"a": [1, True]}, [{"a": [1.0, True]}, '{"a":[1,true]}'], [{"a": [1, 1]}, {"a": [True, True]}, {}]),
        ("json", [], [[], "[]"], [{}, "", None, False, "[" * 100_000]),
        ("json", "x", ["x"], ['"x"', ["x"]]),
        ("json", None, [None, "null"], [0, "", False]),
    ],
)
def test_rules_tell_right_answers_from_wrong_ones(rule: str, expected: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [each for each in right if not is_right(each, rule, expected)] == []
    assert [each for each in wrong if is_right(each, rule, expected)] == []


def test_numbers_are_right_within_the_larger_tolerance() -> None:
    assert is_right(101, "number", 100, relative=0.01) and not is_right(101.1, "number", 100, relative=0.01)
    assert is_right("0.35", "number", 0, absolute=0.5) and not is_right(-0.6, "number", 0, absolute=0.5)
    assert not is_right(10**400, "number", 100, absolute=1e300), "beyond floats"
    assert not is_right(1, "number", 10**400, relative=0.1)


@given(JSON)
def test_every_json_value_equals_itself_and_survives_storage(value: Any) -> None:
    assert is_right(value, "json", value)
    assert answer_in(answer_bytes(value)) == (value,)
    expected = AnswerState(rule="json", expected=value)
    task = dataclasses.replace(TASK, final_state=expected)
    (back,) = read_tasks(tasks_table([task]))
    assert back == task and back.digest == task.digest != TASK.digest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rule": "exact", "expected": 4}, "must be a text that is not blank under rule exact: quote it"),
        ({"rule": "normalized", "expected": "  "}, "must be a text that is not blank"),
        ({"rule": "number", "expected": True}, "must be a number under rule number"),
        ({"rule": "json", "expected": [float("inf")]}, "finite numbers only"),
        ({"rule": "json", "expected": 1, "absolute": 0.1}, "need rule number, and the rule is json"),
        ({"rule": "number", "expected": 1, "relative": 1}, "less than 1"),
        ({"rule": "about", "expected": 1}, "'exact', 'normalized', 'json' or 'number'"),
    ],
)
def test_a_rule_that_can_not_be_met_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AnswerState.model_validate(values)


def test_the_last_answer_counts_and_without_one_what_was_said_last() -> None:
    assert final_answer([1, {"a": 2}], "said") == b'{"answer":{"a":2}}'
    assert final_answer([None], "said") == b'{"answer":null}'
    assert final_answer([], "<think>4? no</think>\n\n 5\n") == b'{"answer":"5"}'
    assert final_answer([], " \n") == final_answer([], "x" * 70_000) == b""


TASK = Task("t", "f", Split.TRAIN, "How many?", {"a.py": b""}, {}, (), b"", {"fail_to_pass": []})


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"diff --git a/a.py b/a.py\n",
        b'{"answer": 4',
        b'{"answer": 5}',
        b'{"answer": 4, "solved": true}',
        b'{"kind": "diff", "answer": 4}',
        b"4",
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_state_that_is_no_answer_or_a_wrong_one_is_unsolved_and_no_fault(state: bytes) -> None:
    verifier = Verifier(SandboxClient("unix:/nowhere"), None)  # no sandbox takes part
    task = dataclasses.replace(TASK, final_state=AnswerState(rule="number", expected=4))

    async def job() -> tuple[bool, bool]:
        return (await verifier.grade(task, state)).solved, (await verifier.grade(task, b'{"answer":4}')).solved

    assert asyncio.run(job()) == (False, True)


def test_the_verdict_does_not_tell_the_expected_answer() -> None:
    state = AnswerState(rule="exact", expected="xyzzy")
    for given_answer in (b"", answer_bytes("plugh")):
        assert "xyzzy" not in str(grade_answer(state, given_answer))


def test_an_answer_is_what_makes_such_an_episode_valid() -> None:
    row: dict[str, Any] = {"outcome": "completed", "format_errors": 0, "tool_calls": []}
    answered = row | {"final_state": [{"kind": "answer", "digest": ""}], "final_diff": b'{"answer":1}'}
    assert is_valid(answered) and not is_valid(answered | {"final_diff": b""})
    assert not is_valid(row | {"final_state": [{"kind": "diff", "digest": ""}], "final_diff": b"x"})
    assert not is_valid(row | {"final_diff": b"x"}), "rows without the column are of diffs"
