"""Compare observed values of a hidden test with its expectations. Executes nothing of a final state."""

from __future__ import annotations

import ast
import builtins
import datetime
import json
import operator
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from contracts.errors import InfraFault
from contracts.tasks import Observed, Rule

_PATTERN_S = 10
"""Processor seconds that the search for a pattern may take. A final state chooses the text, and backtracking may never
end.
"""
_PATTERN_WALL_S = 300.0
_SEARCH = """import json, re, resource, signal, sys
signal.signal(signal.SIGXCPU, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 5))
sys.exit(0 if re.search(*json.load(sys.stdin)) else 3)
"""
_UNMATCHED = (3, -signal.SIGXCPU)
_REPEATS = re.compile(r"[*+?{]")
_LONGEST_RANGE = 50_000
"""Numbers of a range that are compared one by one."""


def _contains(values: Any, item: Any) -> bool:
    """`item in values`. Python compares each number of a range with an item that is no integer; this compares two."""
    if not isinstance(values, range) or isinstance(item, int):
        return item in values
    number = item.real if isinstance(item, complex) and not item.imag else item
    if not isinstance(number, (float, Decimal, Fraction)) or number != number or not values:
        return False
    low, high = sorted((values[0], values[-1]))
    return low <= number <= high and number == int(number) and int(number) in values


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "near": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: _contains(right, left),
    "not in": lambda left, right: not _contains(right, left),
    "isa": lambda left, right: isinstance(left, tuple(getattr(builtins, name) for name in right.split(", "))),
    "has": _contains,
    "has not": lambda left, right: not _contains(left, right),
}
_SINGLETONS = (None, True, False)


class Opaque(Exception):
    """A value has no builtin type: comparing it would execute its code."""


def agrees(observed: Observed, key: str, value: str) -> bool | None:
    """Whether one observation satisfies its assertion; None if that can't be decided. Raises InfraFault."""
    rule = observed.rules[key]
    try:
        sides = json.loads(value)
        if rule.form == "raises":
            return _raised(rule, sides)
        if rule.form == "kind":
            return True
        # only the second side may contain hidden values, which are the expectations
        return _holds(rule, [decode(each, observed.hidden if place else {}) for place, each in enumerate(sides)])
    except Opaque:
        return None
    except InfraFault:
        raise
    except Exception:  # noqa: BLE001 - a malformed report, or values that can't be compared: no assertion holds by them
        return False


def rights(value: str) -> str:
    """Hidden values that an observation was compared with, if any; for a kind, its name."""
    try:
        sides = json.loads(value)
        if sides[0] == "k":
            return str(sides[1])
        return json.dumps(sides[1]) if len(sides) == 2 and _hides(sides[1]) else ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def _hides(encoded: Any) -> bool:
    """Whether an encoding contains a hidden value."""
    return isinstance(encoded, list) and (encoded[:1] == ["h"] or any(map(_hides, encoded[1:] or encoded)))


def _raised(rule: Rule, sides: Sequence[Any]) -> bool:
    _, names, text = sides[0]
    if not {getattr(builtins, name).__name__ for name in rule.names} & set(names):  # older checks have IOError
        return False
    return rule.pattern is None or _matches(rule.pattern, text)


@lru_cache(1024)
def _matches(pattern: str, text: str) -> bool:
    """Whether a regular expression matches anywhere in a text; one that takes too long does not. Raises InfraFault.

    `re` can't be interrupted and blocks all threads, so patterns that may backtrack are matched in a child process.
    """
    if not _REPEATS.search(pattern):
        return re.search(pattern, text) is not None
    command, said = [sys.executable, "-I", "-S", "-c", _SEARCH, f"{_PATTERN_S}"], json.dumps([pattern, text]).encode()
    try:
        done = subprocess.run(command, input=said, timeout=_PATTERN_WALL_S, capture_output=True, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise InfraFault(f"the pattern of an expected exception could not be matched: {error}") from error
    if done.returncode not in (0, *_UNMATCHED):
        raise InfraFault(f"the pattern of an expected exception could not be matched: status {done.returncode}")
    return done.returncode == 0


def _holds(rule: Rule, values: Sequence[Any]) -> bool:
    if rule.form == "truth":
        return bool(values[0] is (rule.want == "True"))
    left, right = (values[0], ast.literal_eval(rule.want)) if rule.want else values
    if rule.operator in ("is", "is not"):
        if not any(right is each for each in _SINGLETONS):
            raise Opaque
        return (left is right) == (rule.operator == "is")
    if rule.tolerance is not None:
        from pytest import approx

        if isinstance(right, range) and len(right) > _LONGEST_RANGE:
            return False
        left = float(left) if isinstance(left, Decimal) and isinstance(right, (int, float)) else left
        right = approx(right, rel=rule.tolerance[0], abs=rule.tolerance[1])
    return bool(_OPERATORS[rule.operator](left, right))


def decode(found: Any, hidden: Mapping[str, str]) -> Any:
    """Value of an encoding (envd/sandbox/observing.py). Raises Opaque for a value without encoding."""
    tag, *rest = found
    if tag == "n":
        return None
    if tag in _SCALARS:
        return _SCALARS[tag](rest[0])
    if tag in _COLLECTIONS:
        return _COLLECTIONS[tag](decode(each, hidden) for each in rest[0])
    if tag == "d":
        return {decode(key, hidden): decode(value, hidden) for key, value in rest[0]}
    if tag == "h":
        return ast.literal_eval(hidden[str(rest[0])])
    if tag == "r":
        return range(*(decode(each, hidden) for each in rest[0]))
    if tag == "Q":
        return Fraction(*(operator.index(decode(each, hidden)) for each in rest[0]))
    if tag == "T":
        if rest[0] == "timedelta":
            return datetime.timedelta(*(decode(each, hidden) for each in rest[1]))
        return _TIMES[rest[0]](rest[1])
    raise Opaque


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "b": lambda text: text is True,
    "i": lambda text: int(text, 16),
    "f": float,
    "c": complex,
    "s": str,
    "y": bytes.fromhex,
    "Y": bytearray.fromhex,
    "D": Decimal,
}
_TIMES: dict[str, Callable[[str], Any]] = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
}
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "S": set, "F": frozenset}
