"""Find the assertions of a test file: compared expression, operator, and literals of the expected value.

What values.py can compute counts as a literal.

assert add(1, 2) == 3                          Comparison(==), literal 3 on its right
@parametrize("a, want", [(1, 2)]) ... == want  literal of the column `want`; so with tables that a `for` reads, and
names of literals
self.assertIn(x, (1, 2)), assert not x         Comparison(in), Truth(negated)
with pytest.raises(ValueError, match="no"):    Raises
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from curation.tasks.checks.scopes import Function, last, reads
from curation.tasks.checks.values import Read, Tolerance, Values, literal

OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_UNITTEST = {
    "assertEqual": "==",
    "assertEquals": "==",
    "assertListEqual": "==",
    "assertTupleEqual": "==",
    "assertDictEqual": "==",
    "assertSetEqual": "==",
    "assertSequenceEqual": "==",
    "assertMultiLineEqual": "==",
    "assertNotEqual": "!=",
    "assertIs": "is",
    "assertIsNot": "is not",
    "assertIn": "in",
    "assertNotIn": "not in",
    "assertGreater": ">",
    "assertGreaterEqual": ">=",
    "assertLess": "<",
    "assertLessEqual": "<=",
    "assertAlmostEqual": "==",
}
OPPOSITES = {
    "assertEqual": "assertNotEqual",
    "assertEquals": "assertNotEqual",
    "assertListEqual": "assertNotEqual",
    "assertTupleEqual": "assertNotEqual",
    "assertDictEqual": "assertNotEqual",
    "assertSetEqual": "assertNotEqual",
    "assertMultiLineEqual": "assertNotEqual",
    "assertNotEqual": "assertEqual",
    "assertIs": "assertIsNot",
    "assertIsNot": "assertIs",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertGreater": "assertLessEqual",
    "assertGreaterEqual": "assertLess",
    "assertLess": "assertGreaterEqual",
    "assertLessEqual": "assertGreater",
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertNotIsInstance": "assertIsInstance",
    "assertAlmostEqual": "assertNotAlmostEqual",
    "assertNotAlmostEqual": "assertAlmostEqual",
    "assertRegex": "assertNotRegex",
    "assertNotRegex": "assertRegex",
    "assertSequenceEqual": "assertNotEqual",
}
"""Opposite methods of unittest; both use the first two arguments in the same way."""
KINDS = frozenset(
    {"bool", "int", "float", "complex", "str", "bytes", "bytearray", "list", "tuple", "dict", "set", "frozenset"}
)
"""Builtin types of observed values."""
_CHECKS = re.compile(r"_?(assert|check|expect|verify|ensure)")
_Fold = Callable[[ast.expr], ast.expr]
"""Writes what can be computed of an expression as literals."""
_RAISES = ("raises", "assertRaises", "assertRaisesRegex")


@dataclass
class Assertion:
    """One statement by which a test can fail."""

    node: ast.stmt
    function: Function
    """Innermost function that contains the assertion."""
    form: Literal["compare", "truth", "raises", "call", "other"]
    """call: a call of an asserting helper. other: fails in another way; only its opposite is known."""
    operator: str = ""
    left: ast.expr | None = None
    """Value under test, which is compared or tested for truth."""
    right: ast.expr | None = None
    expected: list[ast.expr] = field(default_factory=list)
    """Literals, each the expected value of one execution; empty: the expected value is not known to be a literal."""
    direct: bool = False
    """Whether the assertion itself contains the literal."""
    reads: list[tuple[Read, ...]] = field(default_factory=list)
    """Hidden files whose content each expected value contains."""
    tolerance: Tolerance | None = None
    """Relative and absolute tolerance of pytest.approx around the expected value; None: the default."""
    negated: bool = False
    """For form truth: whether the value must be false."""
    exceptions: ast.expr | None = None
    """Exceptions of which one must be raised."""
    pattern: str | None = None
    """Pattern that the exception's text must match."""
    looped: bool = False
    """Whether it may run several times in one test."""


def find(tree: ast.Module, values: Values | None = None) -> list[Assertion]:
    """All assertions of a file, in order. values: of this file; by default without hidden files."""
    return _Finder(tree, values or Values(tree)).found


def exception_names(node: ast.expr) -> list[str] | None:
    """Names of builtin exceptions in an expression that is one exception or a tuple of them."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    known = all(
        isinstance(getattr(builtins, name, None), type) and issubclass(getattr(builtins, name), Exception)
        for name in names
    )
    return names if names and len(names) == len(parts) and known else None


class _Finder:
    def __init__(self, tree: ast.Module, values: Values) -> None:
        self._tree, self._values = tree, values
        self.found: list[Assertion] = []
        self._names = _Names(tree, values)
        self._walk()

    def _walk(self) -> None:
        left: list[tuple[ast.AST, Function | None, bool]] = [(self._tree, None, False)]
        while left:  # a file may be nested too deeply for recursion
            node, function, looped = left.pop()
            if isinstance(node, Function):
                function, looped = node, False
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
                looped = True
            if function is not None:
                for each in self._of(node, function):
                    each.looped = looped
                    self.found.append(each)
            left += [(child, function, looped) for child in reversed(list(ast.iter_child_nodes(node)))]

    def _of(self, node: ast.AST, function: Function) -> Iterator[Assertion]:
        if isinstance(node, ast.Assert):
            yield self._of_assert(node, function)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield from self._of_with(node, function)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found = self._of_call(node, node.value, function)
            if found is not None:
                yield found

    def _of_assert(self, node: ast.Assert, function: Function) -> Assertion:
        test, negated = node.test, False
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, negated = test.operand, not negated
        if not negated and (found := _of_isinstance(node, function, test)) is not None:
            return found
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and not negated:
            operator = OPERATORS[type(test.ops[0])]
            return self._comparison(node, function, operator, test.left, test.comparators[0])
        return Assertion(node, function, "truth", left=test, negated=negated)

    def _comparison(
        self,
        node: ast.stmt,
        function: Function,
        operator: str,
        left: ast.expr,
        right: ast.expr,
        tolerance: Tolerance | None = None,
    ) -> Assertion:
        fold = partial(self._values.folded, function=function)
        mirrored = {"==": "==", "!=": "!=", "is": "is", "is not": "is not"}.get(operator)
        if mirrored and literal(fold(left, tolerance=tolerance)) and not literal(fold(right, tolerance=tolerance)):
            left, right = right, left
        found = Assertion(node, function, "compare", operator, left, right, tolerance=tolerance)
        inner = right
        if isinstance(right, ast.Call) and last(right.func) == "approx" and right.args:
            inner, found.tolerance = right.args[0], _tolerance(right)
            if found.tolerance is None:
                return found
        inner = fold(inner, tolerance=found.tolerance)
        if literal(inner):
            found.expected, found.direct = [inner], True
        elif isinstance(inner, ast.Name):
            found.expected = self._names.values(inner.id, function, found.tolerance)
        if not found.expected and mirrored and isinstance(left, ast.Name) and found.tolerance == tolerance:
            found.expected = self._names.values(left.id, function, tolerance)
            if found.expected:
                found.left, found.right = right, left
        if not found.expected and operator in ("in", "not in") and literal(inner := fold(left)):
            found.left, found.right, found.operator = right, left, "has" if operator == "in" else "has not"
            found.expected, found.direct = [inner], True
        found.reads = [self._values.reads(each) for each in found.expected]
        return found

    def _of_with(self, node: ast.With | ast.AsyncWith, function: Function) -> Iterator[Assertion]:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and last(call.func) in _RAISES and call.args:
                match = next((each.value for each in call.keywords if each.arg == "match"), None)
                if last(call.func) == "assertRaisesRegex" and len(call.args) > 1:
                    match = call.args[1]
                pattern = match.value if isinstance(match, ast.Constant) and isinstance(match.value, str) else None
                yield Assertion(
                    node,
                    function,
                    "raises" if match is None or pattern is not None else "other",
                    left=call,
                    exceptions=call.args[0],
                    pattern=pattern,
                )

    def _of_call(self, node: ast.Expr, call: ast.Call, function: Function) -> Assertion | None:
        name = last(call.func)
        if name not in OPPOSITES and name not in _UNITTEST and name != "assertRaises":
            literals = [each for each in call.args if literal(each)]
            if _CHECKS.match(name) and literals:
                return Assertion(node, function, "call", left=call, expected=literals[-1:])
            return None
        if not (isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)):
            return None
        if name == "assertRaises" and len(call.args) > 1:
            return Assertion(node, function, "other", left=call, exceptions=call.args[0])
        if name not in OPPOSITES or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        if name in ("assertTrue", "assertFalse") and call.args:
            return Assertion(node, function, "truth", left=call.args[0], negated=name == "assertFalse")
        if name == "assertIsInstance" and (kinds := _of_kinds(node, function, call)) is not None:
            return kinds
        if name in ("assertIsNone", "assertIsNotNone") and call.args:
            operator = "is" if name == "assertIsNone" else "is not"
            none = ast.copy_location(ast.Constant(None), call.args[0])
            return Assertion(node, function, "compare", operator, call.args[0], none, expected=[none], direct=True)
        if name not in _UNITTEST or len(call.args) < 2:
            return Assertion(node, function, "other", left=call)
        tolerance = _places(call) if name == "assertAlmostEqual" else None
        found = self._comparison(node, function, _UNITTEST[name], call.args[0], call.args[1], tolerance)
        if name == "assertAlmostEqual":
            found.tolerance = tolerance
            found.form = "compare" if tolerance else "other"
        return found


def _of_isinstance(node: ast.stmt, function: Function, test: ast.expr) -> Assertion | None:
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance":
        return _of_kinds(node, function, test)
    return None


def _of_kinds(node: ast.stmt, function: Function, call: ast.Call) -> Assertion | None:
    """Assertion that the first argument of a call has the builtin types that the second one names."""
    if len(call.args) < 2:
        return None
    kinds = call.args[1].elts if isinstance(call.args[1], ast.Tuple) else [call.args[1]]
    names = [each.id for each in kinds if isinstance(each, ast.Name) and each.id in KINDS]
    if not names or len(names) != len(kinds):
        return None
    wanted = ast.copy_location(ast.Constant(", ".join(names)), call.args[1])
    return Assertion(node, function, "compare", "isa", call.args[0], wanted, expected=[wanted], direct=True)


class _Names:
    """Names that are only expected values: only comparisons of assertions read them."""

    def __init__(self, tree: ast.Module, values: Values) -> None:
        self._tree, self._values = tree, values
        self._only_compared: dict[tuple[int, str], list[bool]] = {}

    def values(self, name: str, function: Function, tolerance: Tolerance | None) -> list[ast.expr]:
        """Literals that a name may have as value in a function; empty if other values are possible.

        tolerance: of the comparison with it.
        """
        stores = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        parameter = name in _parameters(function)
        near = self._compared_only(name, function if parameter or stores else self._tree)
        if not near or len(stores) > (not parameter):
            return []
        scope = function if stores else None
        fold = partial(self._values.folded, function=scope, tolerance=tolerance if all(near) else None)
        if parameter:
            return _column_of_parametrize(function, name, self._literal_of, fold)
        return self._stored(name, function, fold) if stores else _assigned(self._tree.body, name, fold)

    def _stored(self, name: str, function: Function, fold: _Fold) -> list[ast.expr]:
        for node in ast.walk(function):
            if isinstance(node, ast.For):
                found = _column(node.target, name, self._literal_of(node.iter), fold)
                if found:
                    return found
            if isinstance(node, ast.Assign):
                found = _assigned([node], name, fold)
                if found:
                    return found
        return []

    def _literal_of(self, node: ast.expr) -> Sequence[ast.expr]:
        """Elements of a literal list or tuple, or of a module's named one that is read nowhere else."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return node.elts
        if isinstance(node, ast.Name):
            reads = [each for each in ast.walk(self._tree) if isinstance(each, ast.Name) and each.id == node.id]
            found = _assignments(self._tree.body, node.id)
            if len(found) == 1 and len(reads) == 2 and isinstance(found[0], (ast.List, ast.Tuple)):
                return found[0].elts
        return []

    def _compared_only(self, name: str, scope: ast.AST) -> list[bool]:
        """For each use of a name whether the comparison has a tolerance; empty if a use is no comparison."""
        key = (id(scope), name)
        if key not in self._only_compared:
            near = _compared(scope, name)
            self._only_compared[key] = near if reads(scope, name) == len(near) else []
        return self._only_compared[key]


def _compared(scope: ast.AST, name: str) -> list[bool]:
    """Assertions in which a name is a whole side of the comparison: whether the comparison has a tolerance."""
    found: list[bool] = []
    for node in ast.walk(scope):
        sides: list[ast.expr] = []
        near = False
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            sides = [node.test.left, node.test.comparators[0]]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last(node.value.func) in _UNITTEST:
            sides, near = node.value.args[:2], last(node.value.func) == "assertAlmostEqual"
        for side in sides:
            approx = isinstance(side, ast.Call) and last(side.func) == "approx" and bool(side.args)
            inner = side.args[0] if isinstance(side, ast.Call) and approx else side
            if isinstance(inner, ast.Name) and inner.id == name:
                found.append(near or approx)
    return found


def _parameters(function: Function) -> set[str]:
    return {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def _column_of_parametrize(
    function: Function, name: str, literal_of: Callable[[ast.expr], Sequence[ast.expr]], fold: _Fold
) -> list[ast.expr]:
    for mark in function.decorator_list:
        if not (isinstance(mark, ast.Call) and last(mark.func) == "parametrize" and len(mark.args) >= 2):
            continue
        names = _argument_names(mark.args[0])
        if name not in names:
            continue
        rows = literal_of(mark.args[1])
        if len(names) == 1:
            cells = [_unpacked(row) for row in rows]
            found = [
                cell[0] if isinstance(row, ast.Call) and cell else row for row, cell in zip(rows, cells, strict=True)
            ]
        else:
            cells = [_unpacked(row) for row in rows]
            if any(len(cell) != len(names) for cell in cells):
                return []
            found = [cell[names.index(name)] for cell in cells]
        return _literals(found, fold)
    return []


def _unpacked(row: ast.expr) -> list[ast.expr]:
    """Cells of a row: a tuple, a list, or a `pytest.param`."""
    if isinstance(row, ast.Call) and last(row.func) == "param":
        return row.args
    return row.elts if isinstance(row, (ast.Tuple, ast.List)) else []


def _argument_names(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [part.strip() for part in node.value.split(",") if part.strip()]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return []


def _column(target: ast.expr, name: str, rows: Sequence[ast.expr], fold: _Fold) -> list[ast.expr]:
    """Cells of a literal table that a loop assigns to this name."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return []
    places = [index for index, each in enumerate(target.elts) if isinstance(each, ast.Name) and each.id == name]
    if len(places) != 1:
        return []
    cells = [_unpacked(row) for row in rows]
    if any(len(cell) != len(target.elts) for cell in cells):
        return []
    return _literals([cell[places[0]] for cell in cells], fold)


def _assignments(body: Sequence[ast.stmt], name: str) -> list[ast.expr]:
    return [
        node.value
        for node in body
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
    ]


def _assigned(body: Sequence[ast.stmt], name: str, fold: _Fold) -> list[ast.expr]:
    found = _assignments(body, name)
    return _literals(found, fold) if len(found) == 1 else []


def _literals(nodes: Sequence[ast.expr], fold: _Fold) -> list[ast.expr]:
    """The expressions as literals; empty if one is none."""
    found = [fold(each) for each in nodes]
    return found if all(map(literal, found)) else []


def _tolerance(call: ast.Call) -> Tolerance | None:
    """rel and abs of an approx with literal arguments; None for other arguments."""
    given: dict[str, ast.expr] = dict(zip(("rel", "abs"), call.args[1:3], strict=False))
    given |= {each.arg or "": each.value for each in call.keywords}
    if set(given) - {"rel", "abs"} or not all(literal(each) for each in given.values()):
        return None
    rel, near = (ast.literal_eval(given[name]) if name in given else None for name in ("rel", "abs"))
    return (rel, near) if all(each is None or _is_number(each) for each in (rel, near)) else None


def _places(call: ast.Call) -> Tolerance | None:
    """Tolerance of assertAlmostEqual."""
    given = {each.arg or "": each.value for each in call.keywords}
    if len(call.args) > 2:
        given["places"] = call.args[2]
    if set(given) - {"places", "delta", "msg"} or not all(
        literal(each) for name, each in given.items() if name != "msg"
    ):
        return None
    delta, places = (ast.literal_eval(given[name]) if name in given else None for name in ("delta", "places"))
    if delta is not None:
        return (0.0, float(delta)) if places is None and _is_number(delta) else None
    places = 7 if places is None else places
    return (0.0, 0.5 * 10.0**-places) if type(places) is int and abs(places) < sys.float_info.max_10_exp else None


def _is_number(value: Any) -> bool:
    """Whether a value is a real number in the range of floats."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
