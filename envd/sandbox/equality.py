"""Detect objects that equal everything when a test compares them.

Installed once into pytest's assertion rewriting and unittest's assertions. Before `assert a == b` compares, both sides
(and the elements of lists, tuples, sets and dictionaries) are compared with an object that equals nothing, and with
objects like the other side that hold something else. The assertion and its message do not change.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import unittest
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import islice
from types import MemberDescriptorType
from typing import Any

from _pytest.assertion import rewrite

from envd.sandbox.origin import Origin

_PLAIN = frozenset({int, str, float, bytes, bool, complex, type(None), type, range, slice})
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MOST_ELEMENTS, _MOST_DEPTH = 256, 3
_COPIES = 9
_HEAP = 1 << 9
"""Flag of types that Python code defines."""
_GUARD = "_envd_guard"
_ASKED = (ast.Eq, ast.In)
_UNITTEST = (
    "assertEqual",
    "assertIn",
    "assertListEqual",
    "assertTupleEqual",
    "assertDictEqual",
    "assertSetEqual",
    "assertSequenceEqual",
    "assertCountEqual",
)


class _Fresh:
    """An object that equals nothing."""

    def __eq__(self, other: object) -> bool:
        return NotImplemented

    __hash__ = object.__hash__


# Many numbers, since an honest class may compare modulo a small number; other types need few.
_NUMBERS = [int.from_bytes(os.urandom(8), "little") for _ in range(64)]
_LIKE: dict[type, list[Any]] = {
    int: _NUMBERS,
    float: [number * 1.5 for number in _NUMBERS],
    str: [f"{number:x}" for number in _NUMBERS[:8]],
    bytes: [number.to_bytes(8, "little") for number in _NUMBERS[:8]],
    list: [[number] for number in _NUMBERS[:8]],
    tuple: [(number,) for number in _NUMBERS[:8]],
    dict: [{number: number} for number in _NUMBERS[:8]],
    set: [{number} for number in _NUMBERS[:8]],
    complex: [complex(number) for number in _NUMBERS[:8]],
    Decimal: [Decimal(number) for number in _NUMBERS[:8]],
    timedelta: [timedelta(number % 999_983) for number in _NUMBERS[:8]],
    date: [date(1, 1, 1) + timedelta(number % 999_983) for number in _NUMBERS[:8]],
    datetime: [datetime(1, 1, 1) + timedelta(number % 999_983) for number in _NUMBERS[:8]],
}
_armed: list[tuple[Origin, Callable[[str], None]]] = []


def arm(origin: Origin, report: Callable[[str], None]) -> None:
    """Start to call `report("always-equal")` when a test compares an always-equal object of the final state."""
    _armed[:] = [(origin, report)]


def always_equal(found: Any, other: Any = None) -> bool:
    """Whether an object equals an object that equals nothing, or all of many random values of `other`'s type, or a copy
    of `other` with other attributes.
    """
    probes: list[Any] = _LIKE.get(type(other), [])
    return (
        _equals(found, _Fresh())
        or (bool(probes) and all(_equals(found, probe) for probe in probes))
        or (not probes and _equals_class(found, other))
    )


def _equals_class(found: Any, other: Any) -> bool:
    """Whether an object equals those of another class regardless of their attributes.

    Objects that compare by the same method are left to decoys: a class may say that all of its objects are equal.
    """
    kind = type(other)
    try:
        if not kind.__flags__ & _HEAP or hasattr(kind, "__del__") or type(found).__eq__ is kind.__eq__:
            return False
        fresh, *alike = (_copy(other, step) for step in range(_COPIES))
    except BaseException:  # noqa: BLE001 - a class without such copies
        return False
    if any(_says_equal(copy, found) for copy in (fresh, *alike)):
        return False
    return _equals(found, fresh) or all(_equals(found, copy) for copy in alike)


def _copy(found: Any, step: int) -> Any:
    """An object of the same class, whose attributes all differ. Runs no code of the class. Raises without attributes.

    step: 0 for attributes that equal nothing; else how far these are from the original's.
    """
    kind = type(found)
    made = object.__new__(kind)
    count = 0
    for member in {name: each for above in reversed(kind.__mro__) for name, each in vars(above).items()}.values():
        if isinstance(member, MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # it is not set
                member.__set__(made, _other(member.__get__(found), step))
                count += 1
    with contextlib.suppress(AttributeError):  # it has slots only
        held = object.__getattribute__(found, "__dict__")
        object.__getattribute__(made, "__dict__").update({name: _other(each, step) for name, each in held.items()})
        count += len(held)
    if not count:
        raise ValueError("it has no attributes")
    return made


def _other(value: Any, step: int) -> Any:
    """Another value of the same type, where one is known and step is not 0; else an object that equals nothing."""
    kind = type(value)
    if not step or (kind is float and value + step == value):
        return _Fresh()
    if kind is bool:
        return not value
    if kind in (int, float):
        return value + step
    more: dict[type, Any] = {str: "x" * step, bytes: b"x" * step, list: [step], tuple: (step,)}
    return value[:_MOST_ELEMENTS] + more[kind] if kind in more else _Fresh()


def _says_equal(one: Any, other: Any) -> bool:
    """Whether one object's own comparison method accepts the other, as a matcher's does."""
    kind: Any = type(one)
    try:
        answer = kind.__eq__(one, other)
        return answer is not NotImplemented and bool(answer)
    except BaseException:  # noqa: BLE001 - it can't compare them
        return False


def guard(left: Any, right: Any, kind: str = "Eq") -> None:
    """Check both sides of a comparison that a test is about to make."""
    if not _armed or (type(left) in _PLAIN and type(right) in _PLAIN):
        return
    origin, report = _armed[0]
    if kind == "In" and type(right) not in _PLAIN and not isinstance(right, _CONTAINERS) and _holds(right, origin):
        report("always-equal")
    for one, other in ((left, right), (right, left)):
        if _suspect(one, other, origin, _MOST_DEPTH):
            report("always-equal")
            return


def _suspect(found: Any, other: Any, origin: Origin, depth: int) -> bool:
    kind = type(found)
    if kind in _PLAIN:
        return False
    if kind in _CONTAINERS:
        inner: Iterable[Any] = found.values() if kind is dict else found
        beside = _beside(found, other) if type(other) is kind else []
        return depth > 0 and any(
            _suspect(each, beside[index] if index < len(beside) else 0, origin, depth - 1)
            for index, each in enumerate(islice(inner, _MOST_ELEMENTS))
        )
    method = getattr(kind, "__eq__", None)
    if method is object.__eq__ or not kind.__flags__ & _HEAP:  # written in C, so not the final state's
        return False
    return always_equal(found, other) and not _excused(kind, method, origin)


def _beside(found: Any, other: Any) -> list[Any]:
    """Elements of a container of the same type, at the places of `found`'s."""
    if isinstance(found, dict):
        return [other.get(key, 0) if type(key) in _PLAIN else 0 for key in islice(found, _MOST_ELEMENTS)]
    return list(islice(other, _MOST_ELEMENTS)) if isinstance(found, (list, tuple)) else []


def _holds(found: Any, origin: Origin) -> bool:
    method = getattr(type(found), "__contains__", None)
    if method is None or not type(found).__flags__ & _HEAP or _excused(type(found), method, origin):
        return False
    try:
        return _Fresh() in found and all(number in found for number in _NUMBERS)
    except BaseException:  # noqa: BLE001 - the comparison itself will raise it again
        return False


def _excused(kind: type, method: Any, origin: Origin) -> bool:
    """Whether a method belongs to the task's own tests, or to a package, such as unittest.mock.ANY."""
    return origin.vouched(method) or (origin.systems(method) and origin.systems(kind))


def _equals(found: Any, other: Any) -> bool:
    try:
        return bool(found == other)
    except BaseException:  # noqa: BLE001 - the comparison itself will raise it again
        return False


def install() -> None:
    """Add the guard to pytest's rewriting and unittest's assertions, for this process and its forks.

    The guard does nothing before `arm`. No byte code is stored from here on: other processes could not run it.
    """
    if hasattr(rewrite, _GUARD):
        return
    sys.dont_write_bytecode = True
    setattr(rewrite, _GUARD, guard)
    compare = rewrite.AssertionRewriter.visit_Compare

    def visit_compare(self: rewrite.AssertionRewriter, comp: ast.Compare) -> tuple[ast.expr, str]:
        start = len(self.statements)
        answer = compare(self, comp)
        guarded: list[ast.stmt] = []
        for statement in self.statements[start:]:
            asked = statement.value if isinstance(statement, ast.Assign) else None
            if isinstance(asked, ast.Compare) and isinstance(asked.ops[0], _ASKED):
                kind = ast.Constant(type(asked.ops[0]).__name__)
                guarded.append(ast.Expr(self.helper(_GUARD, asked.left, asked.comparators[0], kind)))
            guarded.append(statement)
        self.statements[start:] = guarded
        return answer

    rewrite.AssertionRewriter.visit_Compare = visit_compare  # type: ignore[method-assign]
    for name in _UNITTEST:
        setattr(
            unittest.TestCase, name, _guarded(getattr(unittest.TestCase, name), "In" if name == "assertIn" else "Eq")
        )


def _guarded(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
    __unittest = True

    def asserting(self: unittest.TestCase, first: Any, second: Any, *rest: Any, **named: Any) -> Any:
        guard(first, second, kind)
        return method(self, first, second, *rest, **named)

    asserting.__name__ = method.__name__
    return asserting
