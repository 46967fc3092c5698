"""Compute expected values that are no literals, without running a test: arithmetic, functions of `math`, hidden files.

2 * math.sqrt(2)                                      2.8284271247461903
(Path(__file__).parent / "golden.txt").read_text()    the text of the hidden file
"""

from __future__ import annotations

import ast
import copy
import io
import json
import math
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from contracts.syntax import is_deep, parse_python
from curation.tasks.checks.scopes import Function, Scopes

MOST_BYTES = 1 << 20
"""Size of the largest hidden file that counts as an expectation."""
_MOST_BITS = 4096
"""Of an integer in a computation."""
_MOST_LEVELS, _MOST_PARTS = 50, 50_000
"""Of a value from a file."""
MOST_LEVELS = 100
"""Of an assertion, of a literal, and of what is made of them: a copy takes six frames a level, of the thousand that
Python allows.
"""
_WIDE = 32
"""Least tolerance for a value that may differ between C libraries, in units in its last place."""
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONSTANTS = ("pi", "e", "tau", "inf")
_EXACT = re.compile("ceil|copysign|degrees|fabs|floor|fmod|gcd|isqrt|lcm|ldexp|radians|remainder|sqrt|trunc")
"""Functions of `math` with the same result everywhere."""
_NEAR = re.compile("a?(cos|sin|tan)h?|atan2|cbrt|erfc?|exp|expm1|gamma|hypot|lgamma|log|log10|log1p|log2|pow")
"""Functions whose last bits depend on the C library, so that another one could contradict an honest answer."""
_ENCODINGS = (None, "utf-8", "utf8", "utf-8-sig", "ascii", "latin-1")
_TEXT = frozenset({"encode", "decode", "lstrip", "rstrip", "split", "splitlines", "strip"})
"""Methods of a file's text or bytes that may follow."""
Tolerance = tuple[float | None, float | None]


class _Unknown(Exception):
    """An expression has no value that can be computed."""


@dataclass(frozen=True)
class Read:
    """A hidden file whose content is part of an expected value."""

    path: str
    opened: ast.expr | None = None
    """The call of `open` in a `with` statement, which opens the file for this value alone."""


def literal(node: ast.expr) -> bool:
    """Whether an expression is a literal that `ast.literal_eval` reads and that can be written."""
    try:
        repr(ast.literal_eval(node))  # which refuses integers of more than 4,300 digits
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return not is_deep(node, MOST_LEVELS)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number in the range of floats."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class Values:
    """Expected values of one test file."""

    def __init__(self, tree: ast.Module, path: str = "", data: Mapping[str, bytes] | None = None) -> None:
        """path: of the test file. data: hidden files that may be expectations, by path."""
        self._scopes, self._data = Scopes(tree, path), data or {}
        self._reads: dict[int, tuple[ast.expr, tuple[Read, ...]]] = {}

    def origin(self, node: ast.expr) -> str:
        """As `Scopes.origin`."""
        return self._scopes.origin(node)

    def number(self, node: ast.expr) -> float | None:
        """A number that an expression always has: computed, or of a name that the whole file gives this value only."""
        if isinstance(node, ast.Name):
            given = self._scopes.everywhere(node.id)
            if len({ast.dump(each) for each in given}) != 1:
                return None
            node = given[0]
        found = self.folded(node, None, (1.0, 1.0))
        value = ast.literal_eval(found) if literal(found) else None
        return float(value) if is_number(value) else None

    def reads(self, node: ast.expr) -> tuple[Read, ...]:
        """Hidden files of a value that `folded` returned."""
        return tuple(read for each in ast.walk(node) if id(each) in self._reads for read in self._reads[id(each)][1])

    def folded(self, node: ast.expr, function: Function | None, tolerance: Tolerance | None = None) -> ast.expr:
        """The expression with what can be computed as literals at the same place; unchanged if that is nothing.

        function: innermost one that contains it. tolerance: of the comparison with it.
        """
        try:
            return node if literal(node) else self._folded(node, function, tolerance)
        except Exception:  # noqa: BLE001 - whatever is wrong with an expression, it has no value here
            return node

    def _folded(self, node: ast.expr, function: Function | None, tolerance: Tolerance | None) -> ast.expr:
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            new = copy.copy(node)
            if isinstance(new, ast.Dict):
                new.values = [self.folded(each, function, tolerance) for each in new.values]
            else:
                new.elts = [self.folded(each, function, tolerance) for each in new.elts]
            return new
        evaluation = _Evaluation(self._scopes, self._data, function)
        value = evaluation.value(node)
        found = _written(value)
        if evaluation.near and not _allows(tolerance, value):
            return node
        for each in ast.walk(found):
            ast.copy_location(each, node)
        if evaluation.reads:
            self._reads[id(found)] = found, tuple(evaluation.reads)
        return found


def _written(value: Any) -> ast.expr:
    """The literal of a value."""
    if type(value) in (int, float, str, bytes):
        found: ast.expr = ast.Constant(value)
    else:
        text = repr(value)
        statement = parse_python(text).body[0] if text.count(",") < _MOST_PARTS else None
        found = statement.value if isinstance(statement, ast.Expr) else _unknown()
    if value != value or is_deep(found, _MOST_LEVELS) or not literal(found):
        _unknown()
    return found


def _unknown() -> NoReturn:
    raise _Unknown


def _allows(tolerance: Tolerance | None, value: Any) -> bool:
    """Whether a comparison allows for errors of rounding in a value."""
    if tolerance is None or type(value) is not float or not math.isfinite(value):
        return False
    rel, absolute = tolerance
    if rel is None:
        rel = 1e-6 if absolute is None else 0.0
    return max(absolute or 0.0, rel * abs(value)) >= _WIDE * math.ulp(value)


class _Evaluation:
    """Computation of one value. Its methods raise `_Unknown` for what they do not know."""

    def __init__(self, scopes: Scopes, data: Mapping[str, bytes], function: Function | None) -> None:
        self._scopes, self._data, self._function = scopes, data, function
        self.near = False
        """Whether its last bits depend on the C library."""
        self.reads: list[Read] = []

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as found) if type(found) is not bool:
                return found
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._number(inner)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(self._number(left), self._number(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _bounded(_ARITHMETIC[type(op)](self._number(left), self._number(right)))
            case ast.Call():
                return self._called(node)
        module, _, name = self._scopes.origin(node).rpartition(".")
        return getattr(math, name) if module == "math" and name in _CONSTANTS else _unknown()

    def _number(self, node: ast.expr) -> Any:
        found = self.value(node)
        return found if type(found) in (int, float) else _unknown()

    def _power(self, base: Any, exponent: Any) -> Any:
        if type(base) is int and type(exponent) is int and exponent >= 0:
            return _bounded(base**exponent) if exponent * base.bit_length() <= _MOST_BITS else _unknown()
        self.near = True
        found = float(base) ** float(exponent)
        return found if type(found) is float else _unknown()

    def _called(self, node: ast.Call) -> Any:
        name = self._scopes.origin(node.func)
        function = name.removeprefix("math.")
        near = _NEAR.fullmatch(function) is not None
        if name != function and (near or _EXACT.fullmatch(function)) and not node.keywords:
            self.near |= near
            return _bounded(getattr(math, function)(*map(self._number, node.args)))
        if name in ("json.loads", "json.load") and len(node.args) == 1 and not node.keywords:
            content = self._handle(node.args[0]) if name == "json.load" else self.value(node.args[0])
            return json.loads(content) if isinstance(content, (str, bytes)) else _unknown()
        if not isinstance(node.func, ast.Attribute):
            _unknown()
        inner, method = node.func.value, node.func.attr
        if method in ("read_text", "read_bytes"):
            options = _options(node.args, node.keywords, ("encoding",) if method == "read_text" else ())
            return self._content(inner, method == "read_text", options.get("encoding"))
        if method == "read" and not node.args and not node.keywords:
            return self._handle(inner)
        content = self.value(inner) if method in _TEXT else None
        if not isinstance(content, (str, bytes)) or not hasattr(content, method):
            _unknown()
        named = {each.arg or "": _constant(each.value) for each in node.keywords}
        return getattr(content, method)(*map(_constant, node.args), **named)

    def _handle(self, node: ast.expr) -> str | bytes:
        """Content of an open file: of a call of `open`, or of the name that a `with` statement gives it."""
        opened = None
        if isinstance(node, ast.Name) and self._function is not None:
            node = opened = self._scopes.context(node.id, self._function) or _unknown()
        if not isinstance(node, ast.Call):
            _unknown()
        if self._scopes.origin(node.func) in ("builtins.open", "io.open") and node.args:
            place, given = node.args[0], node.args[1:]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "open":
            place, given = node.func.value, node.args
        else:
            _unknown()
        options = _options(given, node.keywords, ("mode", "buffering", "encoding"))
        mode = options.get("mode", "r")
        if mode not in ("r", "rt", "rb") or "buffering" in options:
            _unknown()
        return self._content(place, mode != "rb", options.get("encoding"), opened)

    def _content(self, node: ast.expr, text: bool, encoding: Any, opened: ast.expr | None = None) -> str | bytes:
        """Content of a hidden file, as Python reads it."""
        path = self._scopes.place(node, self._function)
        data = self._data.get(path) if path is not None else None
        if path is None or data is None or len(data) > MOST_BYTES or encoding not in _ENCODINGS:
            _unknown()
        self.reads.append(Read(path, opened))
        return io.TextIOWrapper(io.BytesIO(data), encoding or "utf-8").read() if text else data


def _options(given: Sequence[ast.expr], keywords: Sequence[ast.keyword], names: Sequence[str]) -> dict[str, Any]:
    """Literal arguments by name; `names` are those of positions."""
    found = dict(zip(names, given, strict=False)) | {each.arg or "": each.value for each in keywords}
    if len(given) > len(names) or not set(found) <= set(names):
        _unknown()
    return {name: _constant(each) for name, each in found.items()}


def _constant(node: ast.expr) -> Any:
    return node.value if isinstance(node, ast.Constant) else _unknown()


def _bounded(value: Any) -> Any:
    return _unknown() if type(value) is int and value.bit_length() > _MOST_BITS else value
