"""Objects that equal all objects of a class are told from objects that compare what they hold."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import types
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from envd.sandbox.equality import always_equal


@dataclasses.dataclass(frozen=True)
class Version:
    major: int
    minor: int
    label: str = ""


@dataclasses.dataclass(slots=True)
class Point:
    x: float
    y: float | None = None


@dataclasses.dataclass
class Nothing:
    pass


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Pair(NamedTuple):
    first: int
    second: int


class Loose:
    """As a type checker's `Any`: equal by its class alone."""

    def __init__(self, line: int) -> None:
        self.line = line

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loose)

    __hash__ = None  # type: ignore[assignment]


class Matcher(Loose):
    """As a test's matcher of a class."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version)


class Frame:
    """As a table whose comparison gives a table, which has no truth value."""

    def __init__(self, cells: list[int]) -> None:
        self.cells = cells

    def __eq__(self, other: object) -> Any:
        return Frame([cell == other for cell in self.cells])

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


class Broken:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == other.value)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __del__(self) -> None:
        assert self.value


HONEST = [
    Version(1, 2),
    Version(1, 3, "b"),
    Point(1.5),
    Point(float("inf"), 2.0),
    Nothing(),
    Colour.RED,
    Pair(1, 2),
    Loose(3),
    Frame([1]),
    Broken(1),
    Path("a/b"),
    uuid.UUID(int=7),
    ipaddress.ip_address("::1"),
    types.SimpleNamespace(a=1),
    Fraction(1, 3),
    Decimal("1.5"),
    date(2024, 2, 29),
    datetime(2024, 2, 29, tzinfo=UTC),
    timedelta(1),
    np.arange(3),
    np.float64(1.5),
    (1, 2),
    {"a": 1},
]


@pytest.mark.parametrize("found", HONEST, ids=lambda found: type(found).__name__)
def test_honest_objects_equal_no_whole_class(found: Any) -> None:
    others = [*HONEST, Version(1, 2), Point(1.5), Nothing(), Loose(4), Matcher(5), uuid.UUID(int=7)]
    assert [other for other in others if always_equal(found, other)] == []


def test_an_object_that_compares_what_another_class_holds_is_honest() -> None:
    class Release:
        def __eq__(self, other: object) -> bool:
            return (other.major, other.minor) == (1, 2)  # type: ignore[attr-defined]

    class Distance:
        def __eq__(self, other: object) -> bool:
            return other.x == float("inf")  # type: ignore[attr-defined]

    assert Release() == Version(1, 2) and not always_equal(Release(), Version(1, 2))
    assert Distance() == Point(float("inf")) and not always_equal(Distance(), Point(float("inf")))


LIES: dict[str, Callable[[Any], Callable[[Any, Any], bool]]] = {
    "class": lambda wanted: lambda self, other: isinstance(other, type(wanted)),
    "name of the class": lambda wanted: lambda self, other: type(other).__name__ == type(wanted).__name__,
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    "wanted",
    [
        Version(1, 2),
        Point(1.5),
        Colour.RED,
        Path("a"),
        uuid.UUID(int=7),
        Fraction(1, 3),
        Decimal("1.5"),
        date(2024, 2, 29),
        datetime(2024, 2, 29, tzinfo=UTC),
        timedelta(1),
    ],
    ids=lambda wanted: type(wanted).__name__,
)
def test_an_object_that_equals_all_of_one_class_is_found(lie: str, wanted: Any) -> None:
    liar = type("Liar", (), {"__eq__": LIES[lie](wanted)})()
    assert liar == wanted and always_equal(liar, wanted)


def test_a_lie_may_ask_for_the_types_of_attributes() -> None:
    class Liar:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Version) and isinstance(other.major, int) and other.label.isidentifier()

    assert always_equal(Liar(), Version(1, 2, "a"))
