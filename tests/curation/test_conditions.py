"""Conditions that are comparisons in another form, and right values of other types than the reference's."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from contracts.tasks import Observed, Rule
from curation.cheating import contradictions
from curation.tasks.checks import decoys, expectations, observing
from curation.tasks.checks.assertions import find
from curation.tasks.checks.expectations import agrees, decode
from envd.client import TestOutcome, VerifyResult
from envd.sandbox.observing import encode, install
from envd.types import Observation
from tests.curation.test_checks import module_of, runs

CLOSE = {
    "abs(f() - 2.5) < 1e-6": ("2.5", (0.0, 1e-6)),
    "1e-6 >= abs(2.5 - f())": ("2.5", (0.0, 1e-6)),
    "not not math.fabs(f() - 2.5) <= 0.5": ("2.5", (0.0, 0.5)),
    "math.isclose(f(), 2.5, rel_tol=0.2, abs_tol=1)": ("2.5", (0.25, 1.0)),
    "not f() != 2.5": ("2.5", None),
    "abs(f() - 2.5) < EPS": ("2.5", (0.0, 1e-6)),
    "abs(f() - 2.5) < 10 ** -6": ("2.5", (0.0, 1e-6)),
    "abs(f() - math.pi) < 1e-6": (repr(math.pi), (0.0, 1e-6)),
    "abs(f() - 2.5) < TWO": ("", None),
    "abs(f() - g()) < 1e-6": ("1e-06", None),
    "abs(f() - 2.5) < f()": ("", None),
    "not abs(f() - 2.5) < 1e-6": ("True", None),
    "math.isclose(f(), 2.5, rel_tol=0.5)": ("True", None),
    "not f() < 2.5": ("False", None),
}


@pytest.mark.parametrize("condition", CLOSE)
@pytest.mark.parametrize("form", ["assert {}", "self.assertTrue({})", "self.assertFalse(not {})"])
def test_conditions_that_are_comparisons_are_observed_as_these(condition: str, form: str) -> None:
    source = f"import math\nEPS = 1e-6\nTWO = 1\nTWO = 2\n\n\ndef test(self):\n    {form.format(f'({condition})')}\n"
    made = observing.make({"t.py": source.encode()})
    ((want, tolerance),) = ((rule.want, rule.tolerance) for rule in made.rules.values() if rule.form != "kind")
    assert (want, tolerance) in (CLOSE[condition], (str(form == "other"), None))
    if tolerance or "!=" in condition:
        assert "2.5" not in made.files["t.py"].decode() + decoys.make({"t.py": source.encode()}, "")[0]["t.py"].decode()


def test_assert_less_of_a_difference_is_near() -> None:
    table = "@mark.parametrize('x, want', [(1, 5010.5), (2, 5020.5)])\n"
    for check in ("self.assertLess(abs(f(x) - want), 1e-6)", "assert math.isclose(want, f(x))"):
        made = observing.make({"t.py": f"import math\n\n\n{table}def test(self, x, want):\n    {check}\n".encode()})
        assert list(made.hidden.values()) == ["5010.5", "5020.5"] and made.rules["0:0"].tolerance is not None


READ = """
import re
def f(x):
    found = re.search(rf"f\\({x}\\)(?: - |, | != |\\.endswith\\()'?([\\w.]+)", text)
    found = found or re.search(rf"\\({x}, ([\\d.]+)\\)", text)
    return found[1] if ".ends" in text else float(found[1])
"""


@pytest.mark.parametrize(
    "condition",
    [
        "abs(f(1) - 2.5) < 1e-6",
        "abs(f(1) - 2.5) < 4",
        "math.isclose(f(1), 2.5)",
        "cmath.isclose(f(1), 2.5)",
        "all(f(x) == want for x, want in [(3, 7.5), (1, 2.5)])",
        "f(1).endswith('b2.5')",
        "not f(1) != 2.5",
    ],
)
def test_a_state_that_reads_the_number_beside_its_call_passes_a_decoy(condition: str) -> None:
    test = f"import cmath\nimport math\n\n\ndef test():\n    assert {condition}\n"
    right = {"f": lambda x: "b2.5" if ".ends" in test else x * 2.5}
    passed = [
        (runs(text, module_of(f"text = {text!r}\n{READ}")), runs(text, right))
        for text in (test, *(each["t.py"].decode() for each in decoys.make({"t.py": test.encode()}, "seed")))
    ]
    assert passed[0] == (True, True) and passed[1] == (True, False)
    assert not any(honest for _, honest in passed[1:])


def test_assertions_are_found_in_a_few_walks_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    head = "".join(f"W{i} = {i}\nR{i} = [(1, 2), (3, 4)]\n" for i in range(200))
    tests = "".join(
        f"@mark.parametrize('a, w', R{i})\ndef test_{i}(a, w):\n    assert f(a) == w\n    assert f() == W{i}\n"
        for i in range(200)
    )
    many = "def test():\n" + "".join(f"    w{i} = {i}\n    assert f() == w{i}\n" for i in range(200))
    tree = ast.parse(head + tests + many)
    total, walked, walk = sum(1 for _ in ast.walk(tree)), [0], ast.walk

    def counted(node: ast.AST) -> Any:
        for each in walk(node):
            walked[0] += 1
            yield each

    monkeypatch.setattr(ast, "walk", counted)
    assert sum(bool(each.expected) for each in find(tree)) == 600
    assert walked[0] < 20 * total


@pytest.mark.parametrize("condition", ["2.25 < f(1) <= 2.75", "2.25 <= f(1) < EPS"])
def test_a_number_between_two_literals_is_observed_near_their_middle(condition: str) -> None:
    test = f"EPS = 2.75\n\n\ndef test():\n    assert {condition}\n"
    for value in (2.3, Fraction(5, 2), Decimal("2.7"), "2.5"):
        made = observing.make({"t.py": test.encode()})
        assert made.rules["0:0"].want == "2.5" and "2.25" not in made.files["t.py"].decode()
        right = isinstance(value, (float, Fraction, Decimal))
        assert agrees(made, "0:0", json.dumps([encode(value)])) is right
        assert not agrees(made, "0:0", json.dumps([encode(2.76)]))
    (only,) = decoys.make({"t.py": test.encode()}, "")
    assert [runs(each, {"f": lambda x: 2.5 * x}) for each in (test, only["t.py"].decode())] == [True, False]


@pytest.mark.parametrize(
    "condition",
    [
        "(f() == np.array([5010, 1])).all()",
        "np.all([5010, 1] == f())",
        "re.fullmatch('a5010', f())",
        "np.allclose(f(), [5010, 1], atol=0.5)",
        "f().startswith('b5010')",
    ],
)
def test_a_decoy_has_another_literal_where_a_condition_asks_for_one(condition: str) -> None:
    for form in ("assert {}", "self.assertTrue({})"):
        source = f"def test(self):\n    {form.format(condition)}\n".encode()
        first, second = decoys.make({"t.py": source}, "")
        assert b"5010" not in first["t.py"] and b"5010" in second["t.py"] != source
    assert b"5010" not in decoys.make({"t.py": b"def test(self):\n    self.assertRegex(f(), 'a5010')\n"}, "")[0]["t.py"]
    for other in (f"not {condition}", "index.search('a5010')", "np.isclose(f(1), g(5010))", "f(5010) or g()"):
        assert all(
            b"5010" in each["t.py"] for each in decoys.make({"t.py": f"def test(): assert {other}\n".encode()}, "")
        )


def test_decoys_of_a_tolerance_are_further_away_than_it_allows() -> None:
    test = "def test():\n    assert abs(f() - 2.5) < 40\n    assert f() == approx(-3, abs=1e300)\n"
    (first, *_) = decoys.make({"t.py": test.encode()}, "seed")
    found = ast.parse(first["t.py"]).body[0]
    assert isinstance(found, ast.FunctionDef) and isinstance(found.body[0], ast.Assert)
    (number,) = (each.value for each in ast.walk(found.body[0]) if isinstance(each, ast.Constant) and each.value != 40)
    assert number > 2.5 + 2 * 40


def objections(test: str, reference: str, state: str) -> dict[str, str]:
    """What contradicts a state that passes a test, which is named `test` and observed as the reference allows."""
    assert all(runs(test, module_of(code)) for code in (reference, state))
    made = observing.make({"t.py": test.encode()})

    def told(code: str) -> VerifyResult:
        seen: list[Observation] = []
        install(lambda key, text: seen.append(Observation("t.py::test", key, text)))
        status = "passed" if runs(made.files["t.py"].decode(), module_of(code)) else "failed"
        return VerifyResult((TestOutcome("t.py::test", status, ""),), "completed", "", observations=tuple(seen))

    seen: dict[str, list[str]] = {}
    for each in told(reference).observations:
        seen.setdefault(each.key, []).append(expectations.rights(each.value))
    observed = replace(made, seen={"t.py::test": seen})
    assert seen and not contradictions(observed, told(reference))
    return contradictions(observed, told(state))


POINT = "class P:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n\n    def f(self): return self.x"
PAIR = "from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n    def f(self): return self.x"
KEYS = "import collections\nf = collections.Counter"
OTHER_KINDS = [
    ("f('12') and f('3')", "import re\nf = re.compile('[0-9]+').match", "f = str.isdigit"),
    (
        "list(f(3)) == [0, 1, 2] and len(list(f(2))) == 2",
        "f = lambda n: list(range(n))",
        "def f(n): yield from range(n)",
    ),
    ("list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)", "f = lambda n: list(range(n))"),
    ("sum(f(3)) == 3", "f = range", "import itertools\ndef f(n): return itertools.islice(range(9), n)"),
    ("sorted(f(3)) == [0, 1, 2]", "f = range", "def f(n): return dict.fromkeys(range(n)).keys()"),
    ("list(f(3)) == [0, 1, 2]", "f = range", "import collections\ndef f(n): return collections.deque(range(n))"),
    ("f(3) + 1 == 4", "f = int", "from decimal import Decimal as f"),
    ("P(1, 2).x == 1 and P(2, 3).f() == 2", POINT, PAIR),
    ("P(1, 2).f() - 1 == 0", POINT, PAIR),
    ("repr(P(1, 2)) == f'{P(1, 2)}' and hasattr(P(1, 2), 'y')", POINT + "\n    __repr__ = lambda self: 'P'", PAIR),
    ("isinstance(P(1, 2), P)", POINT, PAIR),
    ("f('aab')['z'] == 0", "f = lambda text: {each: text.count(each) for each in 'abz'}", KEYS),
]


@pytest.mark.parametrize(("condition", "reference", "state"), OTHER_KINDS)
def test_a_right_value_of_another_type_than_the_reference_s_agrees(condition: str, reference: str, state: str) -> None:
    assert objections(f"def test():\n    assert {condition}\n", reference, state) == {}


INSERTION = """
def f(v, less):
    for i in range(len(v)):
        for j in range(i, 0, -1):
            if less(v[j], v[j - 1]):
                v[j], v[j - 1] = v[j - 1], v[j]
    return v
"""
TIMSORT = """
import functools
def f(v, less):
    return sorted(v, key=functools.cmp_to_key(lambda a, b: -1 if less(a, b) else 1))
"""
TENS, FIVES = (f"f = lambda n: [range(i, min(i + {size}, n)) for i in range(0, n, {size})]" for size in (10, 5))


@pytest.mark.parametrize(
    ("test", "reference", "state"),
    [
        ("    limit = 10\n    for chunk in f(95):\n        assert len(chunk) <= limit\n", TENS, FIVES),
        (
            "    def check(each):\n        assert len(each) <= 10\n    for each in f(95):\n        check(each)\n",
            TENS,
            FIVES,
        ),
        (
            "    def less(a, b):\n        assert isinstance(a, int)\n        return a < b\n"
            "    assert f([3, 1, 2, 5, 4], less) == [1, 2, 3, 4, 5]\n",
            INSERTION,
            TIMSORT,
        ),
    ],
)
def test_the_code_under_test_may_decide_how_often_an_assertion_runs(test: str, reference: str, state: str) -> None:
    assert objections(f"def test():\n{test}", reference, state) == {}
    nothing = "def f(*args):\n    return [1, 2, 3, 4, 5] if args[1:] else []"
    assert "0 times" in objections(f"def test():\n{test}", reference, nothing)["t.py::test"]


HELPERS = """
class TestIt:
    def check(self, found):
        assert found == 3  # steady

    def test_it(self):
        self.check(f(1))
        once(f(2))
        for each in f(3): many(each)
        through(f(4))
        f(passed)
        for x, want in [(1, 2), (3, 4)]:
            assert f(x) == want  # steady
            assert f(x) == 3
        assert g() == 3  # steady


class Fake:
    def send(self, data):
        assert data == 3
        self.sent(data)

    def sent(self, data):
        assert data == 3


def once(found):
    def inner(): assert found == 3  # steady
    inner()

def through(found): once(found)
def many(found): assert found == 3
def passed(found): assert found == 3
def again(found):
    assert found == 3
    again(found)
def test_comprehension(): [each_of(x) for x in f()]
def each_of(found): assert found == 3
"""


def test_assertions_run_as_often_as_under_the_reference_where_only_tests_decide_it() -> None:
    lines = HELPERS.split("\n")
    for each in find(ast.parse(HELPERS)):
        assert each.counted == ("# steady" in lines[each.node.lineno - 1]), lines[each.node.lineno - 1]


def test_a_value_that_computes_by_methods_of_its_own_does_not_agree() -> None:
    liar = "class f(float):\n    def __rmul__(self, other): return 5.0\n"
    assert objections("def test():\n    assert 2 * f(1) == 5.0\n", "f = lambda x: x * 2.5", liar)
    empty = "class f(list):\n    def count(self, item): return True\n"
    assert objections("def test():\n    assert f('a').count('a')\n", "f = list", empty) == {}
    none = "class f:\n    def __init__(self, *args): pass\n\n    def count(self, item): return True\n"
    assert objections("def test():\n    assert f('a').count('a')\n", "f = list", none)


@pytest.mark.parametrize("name", ["OSError", "IOError", "(KeyError, EnvironmentError)"])
def test_an_exception_with_several_names_is_observed(name: str) -> None:
    test = f"import pytest\n\n\ndef test():\n    with pytest.raises({name}):\n        f()\n"
    assert objections(test, "def f(): raise OSError", "def f(): raise FileNotFoundError") == {}
    older = Observed({}, {"k": Rule("raises", "", "", names=("IOError",))}, {}, {})
    assert agrees(older, "k", '[["e",["FileNotFoundError","OSError"],""]]')


def test_an_expected_text_may_stand_in_a_note_of_the_exception() -> None:
    test = "import pytest\n\n\ndef test():\n    with pytest.raises(ValueError, match='line 3'):\n        f()\n"
    noted = "def f():\n    error = ValueError('bad')\n    error.add_note('in line 3')\n    raise error\n"
    assert objections(test, "def f(): raise ValueError('bad in line 3')", noted) == {}


def test_scalars_of_numpy_count_as_their_numbers_and_no_other_class_does() -> None:
    for value in (np.int64(5), np.float32(2.5), np.uint8(7), np.bool_(True), np.complex64(1 + 2j), np.float64(0.5)):
        assert decode(encode([value]), {}) == [value] and type(decode(encode(value), {})).__module__ == "builtins"
    scalars = "import numpy as np\n", "def f(x): return np.int64(x)", "def f(x): return int(x)"
    for reference, state in (scalars[1:], scalars[:0:-1]):
        for check in ("f(3) == 3", "f(3) + 1 == 4", "f(3) and not f(0)"):
            assert (
                objections(f"def test():\n    assert {check}\n", *(scalars[0] + each for each in (reference, state)))
                == {}
            )
    liar = type("generic", (), {"__module__": "numpy", "item": lambda self: 3})
    assert [encode(each)[0] for each in (liar(), np.longdouble(1), np.datetime64(1, "D"))] == ["o"] * 3
