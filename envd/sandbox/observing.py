"""Functions for hidden tests without expectations: encode the values that a test would compare, by builtin types.

    __see__("3", add(1, 2))            for   assert add(1, 2) == 3
    with __raised__("4"): parse("")    for   with pytest.raises(ValueError): parse("")
    __hidden__(7)                      in place of an expected value in a table
    __plain__("3:0", add(1, 2)) < 4    where an assertion computes with a value: an instance of a builtin's subclass
                                       becomes the builtin value; not where its attribute or item is read

No method of an observed value runs: instances of builtins' subclasses are read through the builtins' own methods, so a
false `__eq__` has no effect. A scalar of NumPy counts as the number that it holds. Other objects are encoded by type
name (`["o", type]`) and decide nothing. The grader, which runs elsewhere, has the expected values.
"""

from __future__ import annotations

import builtins
import datetime
import itertools
import json
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import GeneratorType, TracebackType
from typing import Any, Self

MAX_VALUE_BYTES = 1 << 18
"""Maximum size of one observation's JSON; a larger observation is replaced by "too large"."""
_MAX_DEPTH, _MAX_NODES = 24, 50_000
_EXCEPTIONS = {
    id(each): each.__name__  # OSError has others
    for each in vars(builtins).values()
    if isinstance(each, type) and issubclass(each, BaseException)
}
_MESSAGE_CHARACTERS = 10_000
_MRO: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_NAME: Callable[[type], str] = type.__dict__["__name__"].__get__
_FLAGS: Callable[[type], int] = type.__dict__["__flags__"].__get__
_MODULE: Callable[[type], str] = type.__dict__["__module__"].__get__
"""Read what a class says of itself, without its metaclass."""
_HEAP = 1 << 9
"""Flag of types that Python code defines."""
Report = Callable[[str, str], None]
"""Called with an assertion's key and the JSON of its values."""


class Hidden:
    """Placeholder for an expected value."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class TooLarge(Exception):
    """A value has too many parts."""


def encode(value: Any) -> list[Any]:
    """Encode a value as tagged JSON lists. Raises TooLarge."""
    return _Encoder().encode(value, 0)


class _Encoder:
    def __init__(self) -> None:
        self._nodes = 0

    def encode(self, value: Any, depth: int) -> list[Any]:
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            raise TooLarge
        kind = type(value)
        if value is None:
            return ["n"]
        if kind is bool:
            return ["b", value is True]
        if kind is Hidden:
            return ["h", value.number]
        for base in _MRO(kind):
            found = _BY_TYPE.get(id(base))
            if found is not None:
                return found(self, value, depth + 1)
        number = _number_of(value)
        return ["o", _NAME(kind)[:100]] if number is None else self.encode(number, depth)

    def items(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(each, depth) for each in values]


_Encode = Callable[[_Encoder, Any, int], list[Any]]
_BY_TYPE: dict[int, _Encode] = {
    id(int): lambda _, v, d: ["i", hex(int.__int__(v))],
    id(float): lambda _, v, d: ["f", float.__repr__(float.__float__(v))],
    id(complex): lambda _, v, d: ["c", complex.__repr__(v)],
    id(str): lambda _, v, d: ["s", str.__str__(v)],
    id(bytes): lambda _, v, d: ["y", bytes.hex(v)],
    id(bytearray): lambda _, v, d: ["Y", bytearray.hex(v)],
    id(list): lambda e, v, d: ["l", e.items(list.__iter__(v), d)],
    id(tuple): lambda e, v, d: ["t", e.items(tuple.__iter__(v), d)],
    id(set): lambda e, v, d: ["S", e.items(set.__iter__(v), d)],
    id(frozenset): lambda e, v, d: ["F", e.items(frozenset.__iter__(v), d)],
    id(dict): lambda e, v, d: ["d", [[e.encode(key, d), e.encode(each, d)] for key, each in dict.items(v)]],
    id(range): lambda e, v, d: ["r", e.items((v.start, v.stop, v.step), d)],
    id(Decimal): lambda _, v, d: ["D", Decimal.__str__(v)],
    id(Fraction): lambda e, v, d: (
        ["Q", e.items((v.numerator, v.denominator), d)] if type(v) is Fraction else ["o", "Fraction"]
    ),
    id(datetime.datetime): lambda _, v, d: ["T", "datetime", datetime.datetime.isoformat(v)],
    id(datetime.date): lambda _, v, d: ["T", "date", datetime.date.isoformat(v)],
    id(datetime.time): lambda _, v, d: ["T", "time", datetime.time.isoformat(v)],
    id(datetime.timedelta): lambda e, v, d: ["T", "timedelta", e.items((v.days, v.seconds, v.microseconds), d)],
}


def install(report: Report) -> None:
    """Add the functions that rewritten tests call to this process's builtins. `report` gets every observation."""

    def see(key: str, *values: Any) -> None:
        report(key, _told([encode_or_name(each) for each in values]))

    class Raised:
        """Context manager like `pytest.raises` for any exception; reports the exception."""

        def __init__(self, key: str) -> None:
            self._key = key
            self.value: BaseException | None = None
            self.type: type[BaseException] | None = None

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> bool:
            names = [] if kind is None else [_EXCEPTIONS[id(each)] for each in kind.__mro__ if id(each) in _EXCEPTIONS]
            try:
                # as pytest's `match` reads it
                said = "" if error is None else "\n".join(map(str, (error, *getattr(error, "__notes__", ()))))
            except Exception:  # noqa: BLE001 - of the code under test
                said = ""
            report(self._key, _told([["e", names, said[:_MESSAGE_CHARACTERS]]]))
            self.value, self.type = error, kind
            return kind is None or issubclass(kind, Exception)

    def plain(key: str, value: Any) -> Any:
        found = _plain_of(value)
        report(key, '["k","object"]' if found is _OBJECT else '["k","plain"]')
        return value if found is _OBJECT else found

    for name, value in (("__see__", see), ("__raised__", Raised), ("__hidden__", Hidden), ("__plain__", plain)):
        setattr(builtins, name, value)


_OBJECT = object()
_ALL = slice(None)
_PLAIN: dict[int, Callable[[Any], Any]] = {
    id(int): int.__int__,
    id(float): float.__float__,
    id(complex): complex.__complex__,
    id(str): str.__str__,
    id(bytes): lambda value: bytes.__getitem__(value, _ALL),
    id(list): lambda value: list.__getitem__(value, _ALL),
    id(tuple): lambda value: tuple.__getitem__(value, _ALL),
    id(set): lambda value: set(set.__iter__(value)),
    id(frozenset): lambda value: frozenset(frozenset.__iter__(value)),
    id(dict): lambda value: dict(dict.items(value)),
}
"""By builtin type: a function that returns the builtin value of a subclass's instance."""
_VIEWS: tuple[Any, ...] = ({}.keys(), {}.values(), {}.items())
_ITERATED: tuple[Any, ...] = (*_VIEWS, [], (), set(), "", b"", range(0))
_EXACT = frozenset(
    {
        *_PLAIN,
        *map(id, (bool, type(None), range, bytearray, deque, GeneratorType, enumerate, filter, map, reversed, zip)),
        *map(id, (Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta)),
        *(id(each) for each in vars(itertools).values() if isinstance(each, type)),
        *(id(type(each)) for each in (*_VIEWS, *map(iter, _ITERATED))),
    }
)
"""Types without methods of the code under test, which an assertion can compute with as they are."""


def _number_of(value: Any) -> bool | float | complex | None:
    """The number that a scalar of NumPy holds; None for other values. Python code can't make or change such classes."""
    kind = type(value)
    if _FLAGS(kind) & _HEAP or not any(_MODULE(each) == "numpy" and _NAME(each) == "generic" for each in _MRO(kind)):
        return None
    number = value.item()
    return number if type(number) in (bool, int, float, complex) else None


def _plain_of(value: Any) -> Any:
    """The value as an exact builtin type; `_OBJECT` if its class derives from none."""
    kind = type(value)
    if id(kind) in _EXACT:
        return value
    for base in _MRO(kind):
        if id(base) in _PLAIN:
            return _PLAIN[id(base)](value)
    number = _number_of(value)
    return _OBJECT if number is None else number


def encode_or_name(value: Any) -> list[Any]:
    """Encode a value, or return `["o", "too large"]`."""
    try:
        return encode(value)
    except TooLarge:
        return ["o", "too large"]


def _told(values: list[list[Any]]) -> str:
    text = json.dumps(values, separators=(",", ":"))
    return text if len(text) <= MAX_VALUE_BYTES else json.dumps([["o", "too large"]] * len(values))
