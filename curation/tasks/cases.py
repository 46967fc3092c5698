"""Assertions that distinguish a chain of operations from every chain with one other operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from curation.errors import TaskError
from curation.tasks.operations import COMPARISONS, Operation, allowed, evaluate, places

Chain = tuple[Operation, ...]
Case = tuple[int, ...]
"""Arguments of one assertion."""
Bounds = tuple[int, int]
TESTS: dict[str, tuple[Bounds, Bounds]] = {
    "test_small": ((1, 9), (1, 9)),
    "test_first_large": ((20, 90), (1, 4)),
    "test_any": ((1, 20), (1, 20)),
}
"""Name of a test -> (minimum, maximum) of the first argument, and of the others."""
_PER_TEST = 3
_ATTEMPTS = 50
_CANDIDATES = 12
"""Number of candidates for the arguments of each assertion."""


def mistakes(chain: Sequence[Operation]) -> Iterator[Chain]:
    """Chains that differ from this one in a single operation."""
    for index, place in enumerate(places(len(chain))):
        for other in allowed(place):
            if other is not chain[index]:
                yield (*chain[:index], other, *chain[index + 1 :])


def assertion(chain: Sequence[Operation], function: str, case: Case) -> str:
    """Assertion that `function` returns the chain's value for `case`. Booleans differ from 0 and 1."""
    answer = evaluate(chain, case)
    relation = "is" if isinstance(answer, bool) else "=="
    return f"assert {function}({', '.join(map(str, case))}) {relation} {answer}"


def passes(answer: Sequence[Operation], right: Sequence[Operation], case: Case) -> bool:
    """Whether the chain `answer` passes the assertion of `right`."""
    wanted = evaluate(right, case)
    try:
        given = evaluate(answer, case)
    except ZeroDivisionError:
        return False
    return given is wanted if isinstance(wanted, bool) else given == wanted


def draw_cases(chain: Sequence[Operation], rng: Random) -> dict[str, list[Case]]:
    """Arguments by test name with which every chain with one other operation fails at least one assertion.

    Raises TaskError if no such arguments are found: then two operations are equivalent in this chain.
    """
    for _ in range(_ATTEMPTS):
        drawn, survivors = _draw(chain, rng)
        if not survivors:
            return drawn
    names = [" ".join(each.name for each in other) for other in (chain, survivors[0])]
    raise TaskError(f"no assertions found that tell {names[0]} from {names[1]}")


def _draw(chain: Sequence[Operation], rng: Random) -> tuple[dict[str, list[Case]], list[Chain]]:
    """Arguments by test name, and the mistakes that pass all of them.

    Each test's arguments are the best of a few candidates.
    """
    survivors = list(mistakes(chain))
    drawn: dict[str, list[Case]] = {}
    for name, bounds in TESTS.items():
        drawn[name] = []
        while len(drawn[name]) < _PER_TEST:
            fresh = [case for case in _candidates(chain, bounds, rng) if case not in drawn[name]]
            left = {case: [other for other in survivors if passes(other, chain, case)] for case in fresh}
            best = min(left, key=lambda case: len(left[case]))
            survivors = left[best]
            drawn[name].append(best)
    return drawn, survivors


def _candidates(chain: Sequence[Operation], bounds: tuple[Bounds, Bounds], rng: Random) -> list[Case]:
    """Random arguments on which the chain is defined.

    Every second candidate brings a last comparison near equality, where comparison operators differ.
    """
    found: list[Case] = []
    while len(found) < _CANDIDATES:
        values = [rng.randint(*bounds[min(index, 1)]) for index in range(len(chain) + 1)]
        try:
            if len(found) % 2 and chain[-1] in COMPARISONS:
                values[-1] = evaluate(chain[:-1], values[:-1]) + rng.randint(-1, 1)
            evaluate(chain, values)
        except ZeroDivisionError:
            continue
        found.append(tuple(values))
    return found
