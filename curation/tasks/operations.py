"""Computation of a generated task: a chain of operations, applied from left to right, each in a separate function.

    mibo plus teni times vuda       inner(mibo, teni) = mibo + teni          outer(mibo, teni, vuda) = inner(mibo, teni)
                                    * vuda

A chain of two operations has the places inner and outer, one of three also middle. This module fixes the operations of
each place in training, and those that only the split `unseen` has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

OPERATIONS_VERSION = ""
"""Part of the versions of generated suites, tokenizers and demonstrations. Another operation, or another place for one,
deals all of them anew: write "+operations1", then "+operations2".
"""
Place = Literal["inner", "middle", "outer"]
Number = Callable[[int, int], int]


@dataclass(frozen=True)
class Operation:
    """One binary operation on integers."""

    name: str
    """Name in identifiers and tables."""
    word: str
    """Word between the operands in an instruction."""
    symbol: str
    """Python operator."""
    compute: Number
    """Function that computes the operation."""


ARITHMETIC = (
    Operation("plus", "plus", "+", operator.add),
    Operation("minus", "minus", "-", operator.sub),
    Operation("times", "times", "*", operator.mul),
    Operation("over", "over", "//", operator.floordiv),
    Operation("modulo", "modulo", "%", operator.mod),
    Operation("and", "and", "&", operator.and_),
    Operation("or", "or", "|", operator.or_),
    Operation("xor", "xor", "^", operator.xor),
)
COMPARISONS = (
    Operation("below", "below", "<", operator.lt),
    Operation("above", "above", ">", operator.gt),
    Operation("equals", "equals", "==", operator.eq),
    Operation("differs", "differs from", "!=", operator.ne),
)
OPERATIONS = (*ARITHMETIC, *COMPARISONS)
BY_NAME = {each.name: each for each in OPERATIONS}

_ALLOWED: dict[Place, tuple[Operation, ...]] = {"inner": ARITHMETIC, "middle": ARITHMETIC, "outer": OPERATIONS}
"""Comparisons are only allowed where no operation uses their result."""
_WITHHELD: dict[Place, frozenset[str]] = {
    "inner": frozenset({"over", "xor"}),
    "middle": frozenset({"plus", "and"}),
    "outer": frozenset({"times", "or"}),
}


def places(length: int) -> tuple[Place, ...]:
    """Places of a chain of 2 or 3 operations, from the first operation to the last."""
    return ("inner", "outer") if length == 2 else ("inner", "middle", "outer")


def allowed(place: Place) -> tuple[Operation, ...]:
    """Operations of a place in any split."""
    return _ALLOWED[place]


def trained(place: Place) -> tuple[Operation, ...]:
    """Operations of this place in training tasks and demonstrations, right or wrong."""
    return tuple(each for each in _ALLOWED[place] if each.name not in _WITHHELD[place])


def withheld(place: Place) -> tuple[Operation, ...]:
    """Operations of this place that only the split `unseen` has."""
    return tuple(each for each in _ALLOWED[place] if each.name in _WITHHELD[place])


def evaluate(chain: Sequence[Operation], values: Sequence[int]) -> int:
    """Apply `chain` from left to right to one value more than operations. Raises ZeroDivisionError as Python does."""
    answer = values[0]
    for each, value in zip(chain, values[1:], strict=True):
        answer = each.compute(answer, value)
    return answer
