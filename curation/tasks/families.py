"""The kinds of right answer. A task's bug is another family's expression, so only the instruction tells which one is meant."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Case = tuple[int, int]
"""Arguments of one assertion."""
_LARGEST = 9


@dataclass(frozen=True)
class Family:
    """One kind of right answer for a function of two positive integers."""

    name: str
    phrase: str
    """What the function returns, in words, with {a} and {b}."""
    expression: str
    """The same in Python, with {a} and {b}."""
    compute: Callable[[int, int], int]
    """The same, to be run here."""


FAMILIES = (
    Family("sum", "the sum of {a} and {b}", "{a} + {b}", operator.add),
    Family("difference", "{a} minus {b}", "{a} - {b}", operator.sub),
    Family("product", "the product of {a} and {b}", "{a} * {b}", operator.mul),
    Family("quotient", "the whole quotient of {a} and {b}", "{a} // {b}", operator.floordiv),
    Family("remainder", "the remainder of {a} and {b}", "{a} % {b}", operator.mod),
    Family("power", "{a} to the power {b}", "{a} ** {b}", operator.pow),
    Family("larger", "the larger of {a} and {b}", "max({a}, {b})", max),
    Family("smaller", "the smaller of {a} and {b}", "min({a}, {b})", min),
    Family("greater", "whether {a} is above {b}", "{a} > {b}", operator.gt),
    Family("at_most", "whether {a} is at most {b}", "{a} <= {b}", operator.le),
    Family("equal", "whether {a} equals {b}", "{a} == {b}", operator.eq),
    Family("unequal", "whether {a} differs from {b}", "{a} != {b}", operator.ne),
    Family("distance", "the distance of {a} and {b}", "abs({a} - {b})", lambda a, b: abs(a - b)),
    Family("average", "the floored mean of {a} and {b}", "({a} + {b}) // 2", lambda a, b: (a + b) // 2),
)
BY_NAME = {family.name: family for family in FAMILIES}


def others(family: Family) -> tuple[Family, ...]:
    """Every other family, in order."""
    return tuple(other for other in FAMILIES if other is not family)


def assertion(family: Family, function: str, case: Case) -> str:
    """The assertion that `function` answers `case` as the family does. Booleans are told from 0 and 1."""
    answer = family.compute(*case)
    relation = "is" if isinstance(answer, bool) else "=="
    return f"assert {function}({case[0]}, {case[1]}) {relation} {answer}"


def passes(answer: Family, right: Family, case: Case) -> bool:
    """Whether the expression of `answer` survives the assertion of `right`."""
    wanted, given = right.compute(*case), answer.compute(*case)
    return given is wanted if isinstance(wanted, bool) else given == wanted


def draw_cases(family: Family, rng: Random, per_test: int = 3) -> dict[str, list[Case]]:
    """Arguments by test name, chosen so that every other family's expression fails at least one assertion."""
    while True:
        cases = {
            "test_first_larger": [_ordered(rng)[::-1] for _ in range(per_test)],
            "test_second_larger": [_ordered(rng) for _ in range(per_test)],
            "test_same": [(value, value) for value in rng.sample(range(2, _LARGEST + 1), per_test)],
        }
        flat = [case for test in cases.values() for case in test]
        if all(any(not passes(other, family, case) for case in flat) for other in others(family)):
            return {name: [(a, b) for a, b in test] for name, test in cases.items()}


def _ordered(rng: Random) -> Case:
    low = rng.randint(1, _LARGEST - 1)
    return low, rng.randint(low + 1, _LARGEST)
