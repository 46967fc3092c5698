"""Decoys contradict the tests they are made of; observed tests hold no expectation, and the grader reads values as they
are.
"""

from __future__ import annotations

import ast
import asyncio
import datetime
import json
import math
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InfraFault
from contracts.tasks import Checks, Decoy, Observed, Rule, Split, Task
from curation.tasks.checks import decoys, expectations, observing
from curation.tasks.checks.expectations import agrees, decode
from curation.tasks.checks.proving import prove
from envd.client import TestOutcome, VerifyResult
from envd.sandbox.observing import MAX_VALUE_BYTES, encode, install
from envd.types import Observation

SUITE = b'''"""Tests."""
from __future__ import annotations
import unittest
import pytest
from calc import add, parse

ROWS = [(1, 2, 5000), (2, 2, 5010)]
WANT = {"a": [5020]}


@pytest.mark.parametrize("a,b,want", [(1, 2, 5030), pytest.param(4, 5, 5040, id="x")])
def test_rows(a, b, want):
    assert add(a, b) == want


@pytest.mark.parametrize("a,b,want", ROWS)
def test_table(a, b, want):
    assert want == add(a, b)


def test_all(tmp_path):
    for a, want in [(1, 5050), (3, 5060)]:
        assert add(a, 1) == want, "no"
    expected = "5070"
    assert parse("x") == expected
    assert parse("y") == WANT
    assert add(0.1, 0.2) == pytest.approx(5080.5, abs=1e-3)
    assert not add(0, 0)
    assert (add(1,
                2)) <= 5090
    assert "5100" in parse("z")
    with pytest.raises(ValueError, match="5110") as caught:
        parse(None)
    assert parse(1) is None


class TestCase(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(add(1, 2), 5120)
        self.assertTrue(add(1, 2) > 1)
        self.assertAlmostEqual(add(1.0, 2), 5130.0, places=3)
        with self.assertRaises((KeyError, TypeError)):
            parse(2)
'''
NUMBERS = range(5000, 5140, 10)
FILES = {"tests/test_hidden.py": SUITE}


def test_observed_tests_hold_none_of_their_expectations() -> None:
    made = observing.make(FILES)
    text = made.files["tests/test_hidden.py"].decode()
    ast.parse(text)
    assert (
        not [number for number in NUMBERS if str(number) in text] and "assert " not in text and "ValueError" not in text
    )
    wanted = json.dumps([[rule.want, rule.pattern] for rule in made.rules.values()]) + json.dumps(made.hidden)
    assert [number for number in NUMBERS if str(number) not in wanted] == []


def test_a_file_with_a_byte_order_mark_has_the_checks_of_the_same_without() -> None:
    source = b"def test(): assert add(1, 2) == 3\n"
    marked = b"\xef\xbb\xbf" + source
    assert decoys.make({"t.py": marked}, "") == decoys.make({"t.py": source}, "") != []
    assert observing.make({"t.py": marked}) == observing.make({"t.py": source})


@pytest.mark.parametrize("above", ['X = """\ra"""', 'X = """\r\ra"""', f"X = {'+'.join(['1'] * 5000)}"])
def test_files_with_lone_carriage_returns_or_nested_too_deeply_stay_as_they_are(above: str) -> None:
    files = {"test_it.py": f"{above}\n\n\ndef test_it():\n    assert X == 5010\n".encode()}
    assert decoys.make(files, "seed") == [] and decoys.make_moved(files, "seed") == {}
    assert observing.make(files).files == {} and observing.functions_of(files) == {}
    ends = {path: data.replace(b"\n", b"\r\n") for path, data in FILES.items()}
    assert len(decoys.make(ends, "seed")) == len(decoys.make(FILES, "seed"))


@pytest.mark.parametrize(
    "deep", ["a" + ".f()" * 150, "a" + ".f()" * 800, "f(1)" + " + 1" * 300, "f(" * 190 + "1" + ")" * 190]
)
def test_an_assertion_that_is_nested_too_deeply_is_not_observed(deep: str) -> None:
    files = {"test_it.py": f"def test_it():\n    assert {deep} == 5010\n    assert f(2) == 5020\n".encode()}
    assert observing.functions_of(files) == {"test_it.py::test_it": ["0:0", "0:1"]}
    made = observing.make(files)
    assert list(made.rules) == ["0:1"] and f"assert {deep} == 5010".encode() in made.files["test_it.py"]
    assert len(decoys.make(files, "seed")) == 3


HUGE, DEEP = f"0x{'f' * 4000}", "{1: " * 190 + "1" + "}" * 190


@pytest.mark.parametrize("value", [HUGE, DEEP, f"[f({HUGE}), 1]", f"P({HUGE})"], ids=["huge", "deep", "call", "made"])
@pytest.mark.parametrize("where", ["f() == {0}", "f(f({0})) == 3", "f() == W", "f(a) == w", "f(W) == f()"])
def test_literals_that_can_not_be_written_leave_other_assertions_their_checks(value: str, where: str) -> None:
    table = f"W = {{'a': {value}}}\n\n\n@pytest.mark.parametrize('a, w', [(1, {value}), (2, {value})])\n"
    test = f"def test_it(a, w):\n    assert f(2) == 5020\n    assert {where.format(value)}\n"
    files = {"test_it.py": f"import pytest\n\n{table}{test}".encode()}
    assert observing.make(files).rules["0:0"].want == "5020"
    assert b"== 5020" not in decoys.make(files, "seed")[0]["test_it.py"]


@pytest.mark.parametrize(
    "near", ["places=3, delta=None", "places='x'", "places=-400", "places=10**9", "delta='x'", "delta=0x" + "f" * 400]
)
def test_odd_tolerances_are_read(near: str) -> None:
    case = f"class T(TestCase):\n    def test_it(self):\n        self.assertAlmostEqual(f(), 1.5, {near})\n"
    kept = "delta=None" in near
    rules = observing.make({"test_it.py": case.encode()}).rules
    assert [each.tolerance for each in rules.values()] == ([(0.0, 0.0005)] if kept else [])
    assert not observing.make({"test_it.py": b"def test_it():\n    assert f() == approx(1.5, abs=b'x')\n"}).rules


def test_every_decoy_is_python_differs_from_the_test_and_is_the_same_again() -> None:
    versions = decoys.make(FILES, "seed")
    assert 2 <= len(versions) <= decoys.MOST_DECOYS
    texts = [version["tests/test_hidden.py"] for version in versions]
    assert len({SUITE, *texts}) == len(texts) + 1
    for text in texts:
        ast.parse(text)
        assert text.count(b"\n") == SUITE.count(b"\n"), "line numbers stay"
    assert decoys.make(FILES, "seed") == versions


def test_the_first_decoy_changes_every_assertion() -> None:
    first = decoys.make(FILES, "seed")[0]["tests/test_hidden.py"].decode()
    left = [number for number in NUMBERS if number not in (5090, 5100, 5110) and str(number) in first]
    assert left == []
    assert "> 5090" in first and '"5100" not in' in first and "raises(ValueError" not in first
    assert "is not None" in first and "(KeyError, TypeError)" not in first


MADE = {
    "f(P(1, 2)) == P(1, 3)": "f(P(1, 2)) == P(5, 3)",
    "P(1, b=(2, 'x')) == f()": "P(5, b=(2, 'x')) == f()",
    "f() == [m.P.of(text, 'a.1'), P(1)]": "f() == [m.P.of(text, 'a.5'), P(1)]",
    "P.of('1') == P(1)": "P.of('1') == P(5)",
    "P(1).f() == date(2024, 2, 1)": "P(1).f() == date(2028, 2, 1)",
    "P(1) == P(2)": "P(1) != P(2)",
    "f() == P(x)": "f() != P(x)",
    "str(P(1)) == x": "str(P(1)) != x",
}
"""Comparisons with objects, and the same in the first decoy."""


@pytest.mark.parametrize("written", MADE)
def test_decoys_expect_another_object_where_the_test_makes_one(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoys.Random, "randint", lambda *_: 4)
    first, *others = decoys.make({"t.py": f"def test():\n    assert {written}\n".encode()}, "seed")
    assert first["t.py"].decode() == f"def test():\n    assert {MADE[written]}\n"
    flipped = written.replace("==", "!=")
    assert [each["t.py"].decode() for each in others] == (
        [f"def test():\n    assert {flipped}\n"] if MADE[written] != flipped else []
    ), "an argument may not count"


def runs(source: str, names: dict[str, Any]) -> bool:
    """Whether a test function `test` passes."""
    space = dict(names)
    exec(compile(source, "t", "exec"), space)
    try:
        space["test"]()
    except Exception:  # noqa: BLE001 - whatever it is, it failed
        return False
    return True


def module_of(code: str) -> dict[str, Any]:
    """Names that a module defines."""
    names: dict[str, Any] = {}
    exec(compile(code, "m", "exec"), names)
    return names


literals = st.recursive(
    st.booleans() | st.integers(-99, 99) | st.floats(-99, 99) | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)
conditions = st.sampled_from(
    [
        "f() == {0!r}",
        "{0!r} == f()",
        "f() is not g",
        "f() in [{0!r}]",
        "not (f() != {0!r})",
        "f() == {0!r} and True",
        "f() == want",
    ]
)


@given(value=literals, condition=conditions, seed=st.text(max_size=3))
def test_what_passes_a_test_fails_each_of_its_decoys(value: Any, condition: str, seed: str) -> None:
    source = f"def test():\n    want = {value!r}\n    assert {condition.format(value)}\n"
    names = {"f": lambda: value, "g": object()}
    assert runs(source, names)
    versions = decoys.make({"t.py": source.encode()}, seed)
    assert versions
    for version in versions:
        assert not runs(version["t.py"].decode(), names), version


@given(value=literals, other=literals, condition=conditions)
def test_an_observed_test_agrees_with_what_passes_it_and_contradicts_what_does_not(
    value: Any, other: Any, condition: str
) -> None:
    source = f"def test():\n    want = {value!r}\n    assert {condition.format(value)}\n"
    for given_value in (value, other):
        names = {"f": lambda found=given_value: found, "g": None}
        made = observing.make({"t.py": source.encode()})
        seen: list[tuple[str, str]] = []
        install(lambda key, text, seen=seen: seen.append((key, text)))
        assert runs(made.files["t.py"].decode(), names)
        told = [agrees(made, key, text) for key, text in seen if made.rules[key].form != "kind"]
        assert told in ([runs(source, names)], [None])
        if "is not" not in condition:
            assert told != [None]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(values)
def test_values_survive_their_encoding_with_their_types(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))), {})
    assert found == value and type(found) is type(value)


class Evil(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __int__(self) -> int:
        return 99

    __index__ = __int__


class Hollow(list[int]):
    def __iter__(self) -> Any:
        return iter([1, 2, 3])


class Colour(IntEnum):
    RED = 3


Pair = namedtuple("Pair", "low high")


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (Evil(5), 5),
        (Hollow([7]), [7]),
        (Colour.RED, 3),
        (Pair(1, 9), (1, 9)),
        (OrderedDict(a=1), {"a": 1}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (True, True),
        (Decimal("1.50"), Decimal("1.5")),
        (Fraction(1, 3), Fraction(1, 3)),
        (range(3), range(3)),
        (datetime.timedelta(days=1), datetime.timedelta(days=1)),
    ],
)
def test_a_subclass_of_a_builtin_counts_as_what_it_holds(value: Any, held: Any) -> None:
    assert decode(encode(value), {}) == held


def test_nan_infinity_and_what_is_too_large() -> None:
    assert math.isnan(decode(encode(math.nan), {})) and decode(encode(-math.inf), {}) == -math.inf
    seen: list[str] = []
    install(lambda key, text: seen.append(text))
    names: dict[str, Any] = {}
    exec(
        "loop = []\nloop.append(loop)\n__see__('a', loop)\n__see__('b', 'x' * 1000000)\n__see__('c',"
        " list(range(100000)))",
        names,
    )
    assert [json.loads(text) for text in seen] == [[["o", "too large"]]] * 3
    assert all(len(text) < MAX_VALUE_BYTES for text in seen)


RULES = Observed(
    {},
    {"k": Rule("compare", "==", "3"), "r": Rule("raises", "", "", names=("ValueError",), pattern="no")},
    {"1": "4"},
    {},
)


@pytest.mark.parametrize(
    "report",
    [
        "",
        "[",
        "3",
        "[]",
        "null",
        '[["i"]]',
        '[["i","zz"]]',
        '[["x",3]]',
        '[["h",9]]',
        '[[["i","0x3"]]]',
        "[" * 5000,
        '[["d",[[["l",[]],["n"]]]]]',
        '[["T","datetime","x"]]',
    ],
)
def test_a_malformed_report_satisfies_nothing(report: str) -> None:
    assert agrees(RULES, "k", report) is not True
    assert agrees(RULES, "r", report) is not True


def test_raised_exceptions_are_told_by_builtin_class_and_text() -> None:
    assert agrees(RULES, "r", '[["e",["UnicodeError","ValueError"],"oh no"]]')
    assert not agrees(RULES, "r", '[["e",["KeyError"],"oh no"]]')
    assert not agrees(RULES, "r", '[["e",["ValueError"],"yes"]]')
    assert not agrees(RULES, "r", '[["e",[],""]]')


@pytest.mark.timeout(60)
def test_comparisons_with_a_huge_range_end() -> None:
    def told(check: str, value: object) -> bool | None:
        made = observing.make({"t.py": f"def test():\n    assert {check}\n".encode()})
        (key,) = made.rules
        return agrees(made, key, json.dumps([encode(value)]))

    huge = range(10**18)
    assert told("'x' in tags()", huge) is False and told("'x' not in tags()", huge) is True
    assert told("2.5 in tags()", huge) is False
    assert told("3.0 in tags()", huge) is True
    assert told("3 in tags()", huge) is True and told("-1 in tags()", huge) is False
    near = Observed({}, {"k": Rule("compare", "==", "", tolerance=(None, None))}, {}, {})
    assert agrees(near, "k", json.dumps([encode(huge), encode(huge)])) is False
    assert agrees(near, "k", json.dumps([encode([0, 1, 2]), encode(range(3))])) is True


@pytest.mark.timeout(60)
def test_a_number_that_is_no_pair_of_integers_is_not_computed() -> None:
    assert agrees(RULES, "k", '[["Q",[["s","1e999999999"],["n"]]]]') is False


@pytest.mark.timeout(60)
def test_a_pattern_that_backtracks_without_end_does_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    check = r"with pytest.raises(ValueError, match=r'key (\w+\s*)+: no$'):"
    made = observing.make({"t.py": f"import pytest\n\n\ndef test():\n    {check}\n        f()\n".encode()})
    (key,) = made.rules
    assert agrees(made, key, json.dumps([["e", ["ValueError"], "key \xe9\0 is odd: no"]])) is False
    assert agrees(made, key, json.dumps([["e", ["ValueError"], "key \xe9 is odd: no"]])) is True
    monkeypatch.setattr(expectations, "_PATTERN_S", 1)
    assert agrees(made, key, json.dumps([["e", ["ValueError"], "key " + "a" * 2000]])) is False


@pytest.mark.parametrize("program", ["/bin/false", "/no/such/program"])
def test_a_pattern_that_could_not_be_matched_is_matched_again(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    made = observing.make(
        {"t.py": b"import pytest\n\n\ndef test():\n    with pytest.raises(ValueError, match='bad .+'):\n        f()\n"}
    )
    (key,) = made.rules
    value = json.dumps([["e", ["ValueError"], f"bad {program}"]])
    with monkeypatch.context() as patch:
        patch.setattr(expectations.sys, "executable", program)
        with pytest.raises(InfraFault, match="could not be matched"):
            agrees(made, key, value)
    assert agrees(made, key, value) is True


@pytest.mark.parametrize(
    ("values", "item"),
    [
        (range(1, 10), item)
        for item in (3, 3.0, 3.5, Decimal(3), Decimal("3.5"), Fraction(7), Fraction(7, 2), 4 + 0j, 4 + 1j, "3", None)
    ]
    + [(range(9, 0, -3), item) for item in (3.0, Decimal(4), Fraction(9), 0.0)]
    + [(range(0), 0.0), (range(5), float("nan")), (range(5), float("inf")), (range(5), Decimal("nan"))],
)
def test_membership_in_a_range_is_that_of_python(values: range, item: object) -> None:
    made = observing.make({"t.py": b"def test():\n    assert price() in limits()\n"})
    (key,) = made.rules
    assert agrees(made, key, json.dumps([encode(item), encode(values)])) is (item in values)


@pytest.mark.timeout(60)
def test_a_number_far_outside_a_range_is_not_made_whole() -> None:
    made = observing.make({"t.py": b"def test():\n    assert price() in limits()\n"})
    (key,) = made.rules
    assert agrees(made, key, json.dumps([["D", "1e999999999"], encode(range(10**30))])) is False


def test_checks_survive_json() -> None:
    made = observing.make(FILES)
    made.seen["tests/test_hidden.py::test_rows"] = {"0:0": ['["h", 0]', '["h", 1]']}
    checks = Checks(made, (Decoy({"t.py": b"x = '\xc3\xa9'"}, ("t.py::a",)),), ("t.py::b",), ("frames:sys._getframe",))
    assert Checks.from_json(checks.to_json()) == checks


def test_placeholders_of_hidden_values_satisfy_nothing() -> None:
    observed = Observed({}, {"k": Rule("compare", "==", "")}, {"1": "4"}, {})
    assert agrees(observed, "k", '[["i","0x4"],["h",1]]')
    assert not agrees(observed, "k", '[["h",1],["h",1]]')
    assert not agrees(observed, "k", '[["l",[["h",1]]],["h",1]]')


@pytest.mark.parametrize("check", ["abs(f() - 3) < 1", "2 < f() < 4", "abs(f()) + 1 == 4", "-f() <= -3 and f() <= 3"])
def test_operators_of_a_result_do_not_affect_observed_computations(check: str) -> None:
    class Sly(float):
        def __sub__(self, other: Any) -> Any:
            return 0.0

        __rsub__ = __add__ = __neg__ = __sub__  # type: ignore[assignment]

        def __lt__(self, other: Any) -> bool:
            return True

        __gt__ = __le__ = __ge__ = __lt__

    made = observing.make({"t.py": f"def test():\n    assert {check}\n".encode()})
    for value, right in ((Sly(99.0), False), (Sly(3.0), True), (3, True)):
        seen: list[tuple[str, str]] = []
        install(lambda key, text, seen=seen: seen.append((key, text)))
        assert runs(made.files["t.py"].decode(), {"f": lambda value=value: value})
        compared = [(key, text) for key, text in seen if made.rules[key].form != "kind"]
        assert [agrees(made, key, text) for key, text in compared] == [right]


@pytest.mark.parametrize("late", [1, 2])
def test_a_decoy_that_does_not_end_in_time_proves_nothing(late: int) -> None:
    name, source = "t.py::test_adds", b"from calc import add\n\n\ndef test_adds():\n    assert add(1, 2) == 3\n"
    task = Task("adds", "", Split.TRAIN, "", {}, {"t.py": source}, (name,), b"", {})
    decoys_run: list[str] = []

    async def run(hidden: Mapping[str, bytes] | None, tests: Sequence[str] | None) -> VerifyResult:
        text = (hidden or task.hidden_files)["t.py"]
        if text == source:
            return VerifyResult((TestOutcome(name, "passed"),), "completed", "")
        if b"__see__" in text:
            return VerifyResult((TestOutcome(name, "missing"),), "crashed", "")
        decoys_run.append(text.decode())
        if len(decoys_run) <= late:
            return VerifyResult((TestOutcome(name, "missing"),), "timed_out", "")
        return VerifyResult((TestOutcome(name, "failed"),), "completed", "")

    checks = asyncio.run(prove(task, run)).checks
    assert len(decoys_run) == 2
    assert [each.tests for each in checks.decoys] == ([(name,)] if late == 1 else [])
    assert checks.undecided == (() if late == 1 else (name,))


@pytest.mark.parametrize("late", [0, 1])
def test_a_test_is_observed_although_its_first_observed_run_was_late(late: int) -> None:
    name, source = "t.py::test_adds", b"from calc import add\n\n\ndef test_adds():\n    assert add(1, 2) == 3\n"
    task = Task("adds", "", Split.TRAIN, "", {}, {"t.py": source}, (name,), b"", {})
    observed_runs = 0

    async def run(hidden: Mapping[str, bytes] | None, tests: Sequence[str] | None) -> VerifyResult:
        nonlocal observed_runs
        text = (hidden or task.hidden_files)["t.py"]
        if b"__see__" not in text:
            return VerifyResult((TestOutcome(name, "passed" if text == source else "failed"),), "completed", "")
        observed_runs += 1
        if observed_runs <= late:
            return VerifyResult((TestOutcome(name, "missing", "no report of its call"),), "timed_out", "")
        seen = (Observation(name, "0:0", '[["i","0x3"]]'),)
        return VerifyResult((TestOutcome(name, "passed"),), "completed", "", observations=seen)

    checks = asyncio.run(prove(task, run)).checks
    assert checks.fully_observed == {name} and observed_runs == late + 1


def test_a_test_that_never_ends_with_other_expectations_is_left_out_of_its_decoy() -> None:
    source = b"def test_a():\n    assert f() == 1\n\n\ndef test_b():\n    assert g() == 2\n\n\n" + (
        b"def test_c():\n    assert h() == 3\n"
    )
    names = tuple(f"t.py::test_{each}" for each in "abc")
    task = Task("waits", "", Split.TRAIN, "", {}, {"t.py": source}, names, b"", {})
    asked: list[tuple[str, ...]] = []

    async def run(hidden: Mapping[str, bytes] | None, tests: Sequence[str] | None) -> VerifyResult:
        text = (hidden or task.hidden_files)["t.py"]
        if text == source:
            return VerifyResult(tuple(TestOutcome(name, "passed") for name in names), "completed", "")
        if b"__see__" in text:
            return VerifyResult(tuple(TestOutcome(name, "missing") for name in names), "crashed", "")
        asked.append(tuple(tests or ()))
        if names[1] not in asked[-1]:
            return VerifyResult(tuple(TestOutcome(name, "failed") for name in asked[-1]), "completed", "")
        began = TestOutcome(names[1], "missing", "no report of its call")
        late = TestOutcome(names[2], "missing", "not collected or never reported")
        return VerifyResult((TestOutcome(names[0], "failed"), began, late), "timed_out", "")

    checks = asyncio.run(prove(task, run)).checks
    assert set(asked) == {names, (names[0], names[2])}
    assert {each.tests for each in checks.decoys} == {(names[0], names[2])}
    assert checks.undecided == (names[1],)


@pytest.mark.parametrize("decorator", ["", "@given(st.integers())\n", "@hypothesis.given(a=st.integers())\n"])
def test_tests_whose_values_are_drawn_anew_are_not_observed(decorator: str) -> None:
    name = "t.py::test"
    source = f"{decorator}def test(a=2):\n    assert f(a) == a\n".encode()
    task = Task("drawn", "", Split.TRAIN, "", {}, {"t.py": source}, (name,), b"", {})

    async def run(hidden: Mapping[str, bytes] | None, tests: Sequence[str] | None) -> VerifyResult:
        text = (hidden or task.hidden_files)["t.py"].decode().removeprefix(decorator)
        seen: list[Observation] = []
        install(lambda key, value: seen.append(Observation(name, key, value)))
        passes = runs(text, {"f": lambda a: a})
        return VerifyResult(
            (TestOutcome(name, "passed" if passes else "failed"),), "completed", "", observations=tuple(seen)
        )

    checks = asyncio.run(prove(task, run)).checks
    assert (checks.observed is None) == bool(decorator)
    assert [each.tests for each in checks.decoys] == [(name,)] and not checks.undecided


INPUTS = """
def test_literal():
    assert leap(give()) is True


def test_truth():
    assert leap(give())


def test_helper():
    assert leap(3) == other(give())


def test_none():
    call(give())


def give():
    return 2000
"""


def test_decoys_with_other_inputs_hold_tests_whose_expectations_are_no_literals() -> None:
    """Tests without a decoy run beside the others, so that their calls do not tell a state which run is a decoy."""
    names = tuple(f"t.py::test_{each}" for each in ("literal", "truth", "helper", "none"))
    task = Task("inputs", "", Split.TRAIN, "", {}, {"t.py": INPUTS.encode()}, names, b"", {})

    async def run(hidden: Mapping[str, bytes] | None, tests: Sequence[str] | None) -> VerifyResult:
        space = module_of((hidden or task.hidden_files)["t.py"].decode())
        space |= {"leap": lambda year: year in (3, 2000), "other": lambda year: year == 2000, "call": print}
        seen: list[Observation] = []
        outcomes = []
        for name in tests or names:
            install(lambda key, text, name=name: seen.append(Observation(name, key, text)))
            try:
                space[name.partition("::")[2]]()
                outcomes.append(TestOutcome(name, "passed"))
            except AssertionError:
                outcomes.append(TestOutcome(name, "failed"))
        return VerifyResult(tuple(outcomes), "completed", "", observations=tuple(seen))

    checks = asyncio.run(prove(task, run)).checks
    moved = next(each for each in checks.decoys if b"lambda found" in each.files["t.py"])
    assert [each.tests for each in checks.decoys if each is not moved] == [names[:3]] and moved.tests == names[1:3]
    assert checks.undecided == checks.beside == names[3:]
    assert Checks.from_json(checks.to_json()) == checks and "beside" not in replace(checks, beside=()).to_json()
