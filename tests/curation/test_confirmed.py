"""Passed tests of unsolved states, where rewards pay for them: graded by a real envd server."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verifier_tasks import graded, task_of, with_checks

from contracts.tasks import Observed, Rule, Task
from curation.cheating import agreeing
from curation.tasks.checks import observing
from curation.tasks.checks.proving import wholly_observed
from curation.verdicts import Verdict
from envd.client import VerifyResult
from envd.types import Observation

WRONG = "def rows(count):\n    return None\n"
RIGHT = "def rows(count):\n    if count < 0:\n        raise ValueError('negative')\n    return [3] * count\n"
TESTS = """\
import pytest

from rows import rows

seen = []


def check(found, expected):
    assert len(found) == len(expected)
    assert found == expected


@pytest.fixture
def count():
    return 3


def test_two():
    seen.append(2)
    assert rows(2) == [3, 3]


def test_large():
    check(rows(5), [3, 3, 3, 3, 3])


@pytest.mark.parametrize("number, expected", [(0, []), (1, [3])])
def test_small(number, expected):
    assert rows(number) == expected


def test_each():
    for row in rows(4):
        assert row == 3


def test_fixture(count):
    assert rows(count) == [3, 3, 3]


def test_later():
    assert seen == [2]


def test_negative():
    with pytest.raises(ValueError):
        rows(-1)
"""
NAMES = ("two", "large", "small[0-expected0]", "small[1-expected1]", "each", "fixture", "later", "negative")


@pytest.fixture(scope="module")
def task() -> Task:
    return with_checks(task_of("rows.py", WRONG, RIGHT, TESTS, [f"test_{name}" for name in NAMES]))


def passed(verdict: Verdict) -> set[str]:
    """Names of the tests that count."""
    return {row.name.partition("::test_")[2] for row in verdict.tests if row.status == "passed"}


ALL_BUT_ONE = set(NAMES) - {"negative"}
HONEST = {
    "all but one": ("def rows(count):\n    return [3] * count\n", ALL_BUT_ONE),
    "an error instead": (
        "def rows(count):\n    if count != 2:\n        raise ValueError\n    return [3, 3]\n",
        {"two", "later", "negative"},
    ),
    "one parameter of a function": (
        "def rows(count):\n    return [3] * count if count else None\n",
        ALL_BUT_ONE - {"small[0-expected0]"},
    ),
    "an error with one parameter": (
        "def rows(count):\n    return [3] * count if 1 // count else [3] * count\n",
        ALL_BUT_ONE - {"small[0-expected0]"},
    ),
    "only beside the test that failed": (
        "def rows(count):\n    return [3] * count if count != 2 else None\n",
        ALL_BUT_ONE - {"two", "later"},
    ),
    "a loop without rows": ("def rows(count):\n    return [3] * count if count != 4 else []\n", ALL_BUT_ONE - {"each"}),
    "right for one input": ("def rows(count):\n    return [3, 3, 3]\n", {"each", "fixture"}),
}


@pytest.mark.slow
def test_an_honest_state_gets_the_share_that_it_passes_alone(task: Task) -> None:
    verdicts = graded(task, *({"rows.py": code} for code, _ in HONEST.values()), confirm=True)
    for (name, (_, counted)), verdict in zip(HONEST.items(), verdicts, strict=True):
        found = (passed(verdict), verdict.solved, verdict.tampered, verdict.exit)
        assert found == (counted, False, False, "completed"), (name, verdict)


FORGED = {
    "reads the tests": """\
import os
import re

TEXT = os.popen("cat tests/*hidden*.py").read()


def rows(count):
    found = re.search(rf"rows\\({count}\\) == (\\[.*\\])", TEXT)
    return [int(each) for each in found[1].strip("[]").split(",")] if found else None
""",
    "hides a liar": """\
import weakref


class Liar:
    def __eq__(self, other):
        return True


kept = Liar()


def rows(count):
    return weakref.proxy(kept)
""",
    "mocks an answer": """\
from unittest.mock import MagicMock

answer = MagicMock()
answer.__eq__ = lambda self, other: True


def rows(count):
    return answer
""",
}


OBSERVED = Observed(
    {},
    {"0:0": Rule("compare", "==", ""), "0:0:0": Rule("kind", "", "", exact=False)},
    {"4": "10", "5": "20", "6": "30"},
    {"t": {"0:0": ['["h", 4]', '["h", 5]', '["h", 6]'], "0:0:0": ["plain"] * 3}},
)


@pytest.mark.parametrize(
    ("rows", "named", "count"),
    [
        ({"t[a]": [(10, 4)], "t[b]": [(20, 5)], "t[c]": [(30, 6)]}, 3, 3),
        ({"t[a]": [(10, 4)], "t[b]": [(21, 5)]}, 3, 1),
        ({"t[a]": [(10, 4)], "t[b]": [(10, 4)], "t[c]": [(10, 4)]}, 3, 1),
        ({"t[a]": [(10, 4), (20, 5), (30, 6)]}, 3, 0),
        ({"t[a]": [(10, 7)]}, 3, 0),
        ({"t[a]": [(10, 4)], "t[b]": [(20, 5)], "t[c]": [(31, 6)]}, 2, 1),
        ({"t[a]": [(10, 4)]}, 1, 0),
        ({}, 3, 0),
    ],
)
def test_parameters_count_by_values_that_agree_each_with_an_expectation_of_its_own(
    rows: dict[str, list[tuple[int, int]]], named: int, count: int
) -> None:
    """Parameters that the task does not name may be those that agree."""
    told = [
        each
        for name, values in rows.items()
        for value, number in values
        for each in (
            Observation(name, "0:0:0", '["k","plain"]'),
            Observation(name, "0:0", f'[["i","{hex(value)}"],["h",{number}]]'),
        )
    ]
    result = VerifyResult((), "completed", "", observations=tuple(told))
    assert agreeing(OBSERVED, "t", named, result) == count
    assert agreeing(OBSERVED, "t", named, replace(result, exit="timed_out")) == 0
    objects = {"t": {**OBSERVED.seen["t"], "0:0:0": ["object"] * 3}}
    assert agreeing(replace(OBSERVED, seen=objects), "t", named, result) == count, "a builtin value is as good"


def test_of_methods_with_one_name_none_is_wholly_observed_if_one_is_not() -> None:
    test = "    def test_it(self):\n        assert f() == {}\n\n\n"
    files = {
        "t.py": f"class TestA:\n{test.format(1)}class TestB:\n{test.format('Box(1)')}def test_c(): f(1)\n".encode()
    }
    names = ("t.py::TestA::test_it", "t.py::TestB::test_it", "t.py::test_c")
    seen: dict[str, dict[str, list[str]]] = {name: {} for name in names}
    some, both = (replace(observing.make(files, without), seen=seen) for without in (["0:1"], []))
    assert wholly_observed(names, some, files) == {"t.py::test_c"}
    assert wholly_observed(names, both, files) == set(names)
    assert wholly_observed(names[:0], some, files) == frozenset()


ENDS = {
    "timed_out": "import time\n\n\ndef rows(count):\n    time.sleep(60 * (count == 4))\n    return [3] * count\n",
    "crashed": (
        "import os\nimport signal\n\n\ndef rows(count):\n    if count == 4:\n        os.kill(os.getpid(),"
        " signal.SIGSEGV)\n    return [3] * count\n"
    ),
}
LIES_THEN_HANGS = FORGED["mocks an answer"].replace("    return", "    while count == 4:\n        pass\n    return")


@pytest.mark.slow
def test_tests_that_passed_before_a_run_broke_off_are_confirmed_without_the_others(task: Task) -> None:
    verdicts = graded(
        task, *({"rows.py": code} for code in (*ENDS.values(), LIES_THEN_HANGS)), confirm=True, timeout_s=2
    )
    for exit, verdict in zip(ENDS, verdicts, strict=False):
        assert (verdict.exit, verdict.tampered) == (exit, False), verdict
        assert passed(verdict) == {"two", "large", "small[0-expected0]", "small[1-expected1]"}
    assert verdicts[-1].tampered and not verdicts[-1].tests_passed, verdicts[-1]


def test_a_parameter_that_lies_beside_one_that_fails_does_not_count(task: Task) -> None:
    liar, _, _ = FORGED["hides a liar"].partition("def rows")
    code = liar + "def rows(count):\n    return weakref.proxy(kept) if count == 1 else [3] * count or None\n"
    (verdict,) = graded(task, {"rows.py": code}, confirm=True)
    assert passed(verdict) == ALL_BUT_ONE - {"small[0-expected0]", "small[1-expected1]"}, verdict


def test_a_forger_that_fails_a_test_on_purpose_has_passed_none(task: Task) -> None:
    states = [{"rows.py": code} for code in FORGED.values()]
    for name, believed, verdict in zip(FORGED, graded(task, *states), graded(task, *states, confirm=True), strict=True):
        assert not believed.solved and not believed.tampered and believed.tests_passed >= 2, "one run alone believes it"
        assert verdict.tampered and verdict.tests_passed == 0, (name, verdict)
