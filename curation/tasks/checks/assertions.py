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
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from curation.tasks.checks.scopes import Function, assignments, last
from curation.tasks.checks.values import Read, Tolerance, Values, is_number, literal

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
_NEGATED = {"==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_CHECKS = re.compile(r"_?(assert|check|expect|verify|ensure)")
_Fold = Callable[[ast.expr], ast.expr]
"""Writes what can be computed of an expression as literals."""
_NO_LOOP, _OVER_TABLE, _OTHER_LOOP = range(3)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_INLINE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MOST_PART = 0.25
"""Largest relative tolerance of `math.isclose` with which no number is close to two that differ as in decoys."""
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
    counted: bool = True
    """Whether the test alone decides how often it runs: neither in a loop, except over a table of its expected values,
    nor in a function that the code under test may call.
    """


def find(tree: ast.Module, values: Values | None = None) -> list[Assertion]:
    """All assertions of a file, in order. values: of this file; by default without hidden files."""
    return _Finder(tree, values or Values(tree)).found


def exception_names(node: ast.expr) -> list[str] | None:
    """Names of builtin exceptions in an expression that is one exception or a tuple of them; OSError for IOError."""
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    kinds = [getattr(builtins, part.id, None) for part in parts if isinstance(part, ast.Name)]
    names = [each.__name__ for each in kinds if isinstance(each, type) and issubclass(each, Exception)]
    return names if names and len(names) == len(parts) else None


class _Finder:
    def __init__(self, tree: ast.Module, values: Values) -> None:
        self._tree, self._values = tree, values
        self.found: list[Assertion] = []
        self._names = _Names(tree, values)
        self._walk()

    def _walk(self) -> None:
        steady = _steady(self._tree)
        left: list[tuple[ast.AST, Function | None, int]] = [(self._tree, None, _NO_LOOP)]
        while left:  # a file may be nested too deeply for recursion
            node, function, loop = left.pop()
            if isinstance(node, Function):
                function, loop = node, _NO_LOOP
            elif isinstance(node, _LOOPS):
                table = isinstance(node, ast.For) and bool(self._names.rows(node.iter))
                loop = max(loop, _OVER_TABLE if table else _OTHER_LOOP)
            if function is not None:
                for each in self._of(node, function):
                    often = _OVER_TABLE if each.expected and not each.direct else _NO_LOOP
                    each.counted = loop <= often and id(function) in steady
                    self.found.append(each)
            left += [(child, function, loop) for child in reversed(list(ast.iter_child_nodes(node)))]

    def _of(self, node: ast.AST, function: Function) -> Iterator[Assertion]:
        if isinstance(node, ast.stmt) and (condition := _condition(node)) is not None:
            yield self._of_condition(node, function, *condition)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield from self._of_with(node, function)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            found = self._of_call(node, node.value, function)
            if found is not None:
                yield found

    def _of_condition(self, node: ast.stmt, function: Function, test: ast.expr, negated: bool) -> Assertion:
        if not negated and (kinds := _of_isinstance(node, function, test)) is not None:
            return kinds
        if (near := _near(test, negated, self._values)) is not None:
            found = self._comparison(node, function, *near)
            if found.expected:
                return found
        if (sides := _sides(test, negated)) is not None:
            return self._comparison(node, function, *sides)
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


def _condition(node: ast.AST) -> tuple[ast.expr, bool] | None:
    """The condition of an `assert`, `assertTrue` or the like without `not`, and whether it must be false."""
    match node:
        case ast.Assert(test=test):
            negated = False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(), attr="assertTrue" | "assertFalse" as name), args=[test, *_]
            )
        ) if not isinstance(test, ast.Starred):
            negated = name == "assertFalse"
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(), attr="assertLess" | "assertLessEqual" as name),
                args=[left, right, *_],
            )
        ) if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            return ast.Compare(left, [ast.Lt() if name == "assertLess" else ast.LtE()], [right]), False
        case _:
            return None
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, not negated
    return test, negated


def _sides(test: ast.expr, negated: bool) -> tuple[str, ast.expr, ast.expr] | None:
    """Operator and sides of a condition that is one comparison; None also for `not a < b`, which is not `a >= b`."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    operator = OPERATORS[type(test.ops[0])]
    operator = _NEGATED.get(operator, "") if negated else operator
    return (operator, test.left, test.comparators[0]) if operator else None


def _near(
    test: ast.expr, negated: bool, values: Values
) -> tuple[Literal["==", "near"], ast.expr, ast.expr, Tolerance] | None:
    """The values that a condition allows to differ a little, and how much: `abs(a - b) < 0.1`, `math.isclose(a, b)`,
    and `1 < a < 2` as `near` the middle.
    """
    if negated:
        return None
    match test:
        case ast.Compare(left=most, ops=[ast.Gt() | ast.GtE()], comparators=[call]):
            return _near(ast.Compare(call, [ast.Lt()], [most]), negated, values)
        case ast.Compare(
            left=ast.Call(func=called, args=[ast.BinOp(left=left, op=ast.Sub(), right=right)], keywords=[]),
            ops=[ast.Lt() | ast.LtE()],
            comparators=[most],
        ) if values.origin(called) in ("builtins.abs", "math.fabs"):
            bound = values.number(most)
            return ("==", left, right, (0.0, bound)) if bound is not None and bound >= 0 else None
        case ast.Compare(left=least, ops=[ast.Lt() | ast.LtE(), ast.Lt() | ast.LtE()], comparators=[left, most]):
            low, high = values.number(least), values.number(most)
            if low is None or high is None or not low <= high:
                return None
            middle, half = low / 2 + high / 2, high / 2 - low / 2
            room = half + 4 * max(map(math.ulp, (low, high)))  # the test as written is exact
            return "near", left, ast.copy_location(ast.Constant(middle), most), (0.0, room)
        case ast.Call(func=called, args=[left, right], keywords=given) if values.origin(called) == "math.isclose":
            options = {each.arg: values.number(each.value) for each in given}
            rel, bound = options.pop("rel_tol", 1e-9), options.pop("abs_tol", 0.0)
            if not options and rel is not None and bound is not None and 0 <= rel <= _MOST_PART and bound >= 0:
                return "==", left, right, (rel / (1 - rel), bound)  # `rel` is a part of the larger value
    return None


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


def _steady(tree: ast.Module) -> set[int]:
    """Ids of the functions that run as often as the tests say, whatever these test: tests, and functions that such
    functions only call, by name or from `self`, outside of loops.
    """
    names: dict[int, str] = {}
    reads: Counter[str] = Counter()
    calls: dict[str, list[int]] = {}
    left: list[tuple[ast.AST, ast.AST, int, bool]] = [(tree, tree, 0, False)]
    while left:
        node, above, function, looped = left.pop()
        if isinstance(node, Function):
            names[id(node)] = f"{'.' * isinstance(above, ast.ClassDef)}{node.name}"
            function, looped = id(node), False
        elif isinstance(node, (*_LOOPS, *_INLINE)):
            looped = True
        elif isinstance(node, ast.Call) and (called := _own(node.func)):
            calls.setdefault(called, []).append(0 if looped else function)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            reads[node.id if isinstance(node, ast.Name) else f".{node.attr}"] += 1
        left += [(child, node, function, looped) for child in ast.iter_child_nodes(node)]
    steady = {each for each, name in names.items() if name.strip(".").startswith("test")}
    while more := {
        each
        for each in names.keys() - steady
        if len(sites := calls.get(names[each], [])) == reads[names[each]] and sites and steady.issuperset(sites)
    }:
        steady |= more
    return steady


def _own(node: ast.expr) -> str:
    """Name of a function of the file, with a dot if it is `self`'s; empty for another expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


class _Scope:
    """How a function, or a whole file, uses names."""

    def __init__(self, scope: ast.AST, values: Values) -> None:
        self.names: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()
        self.givers: dict[str, ast.For | ast.Assign] = {}
        """The last statement that gives a name values."""
        reads: Counter[str] = Counter()
        compared: dict[str, list[bool]] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Name):
                self.names[node.id] += 1
                self.stores[node.id] += isinstance(node.ctx, ast.Store)
                reads[node.id] += isinstance(node.ctx, ast.Load)
            elif isinstance(node, (ast.For, ast.Assign)):
                target = node.target if isinstance(node, ast.For) else node.targets[0]
                named = (each for each in ast.walk(target) if isinstance(each, ast.Name))
                self.givers |= {each.id: node for each in named}
            for side, near in _compared(node, values):
                compared.setdefault(side.id, []).append(near)
        self.only_compared = {name: near for name, near in compared.items() if len(near) == reads[name]}
        """Names that only assertions read, each as a whole side: for each use whether it has a tolerance."""


class _Names:
    """Names that are only expected values: only comparisons of assertions read them."""

    def __init__(self, tree: ast.Module, values: Values) -> None:
        self._tree, self._values = tree, values
        self._assigned = assignments(tree.body)
        self._scopes: dict[int, _Scope] = {}

    def _scope(self, node: ast.AST) -> _Scope:
        if id(node) not in self._scopes:
            self._scopes[id(node)] = _Scope(node, self._values)
        return self._scopes[id(node)]

    def values(self, name: str, function: Function, tolerance: Tolerance | None) -> list[ast.expr]:
        """Literals that a name may have as value in a function; empty if other values are possible.

        tolerance: of the comparison with it.
        """
        own, parameter = self._scope(function), name in _parameters(function)
        stores = own.stores[name]
        near = (own if parameter or stores else self._scope(self._tree)).only_compared.get(name, [])
        if not near or stores > (not parameter):
            return []
        scope = function if stores else None
        fold = partial(self._values.folded, function=scope, tolerance=tolerance if all(near) else None)
        if parameter:
            return _column_of_parametrize(function, name, self.rows, fold)
        if not stores:
            found = self._assigned.get(name, [])
            return _literals(found, fold) if len(found) == 1 else []
        match own.givers.get(name):
            case ast.For(target=target, iter=rows):
                return column(target, name, self.rows(rows), fold)
            case ast.Assign(targets=[ast.Name()], value=value):
                return _literals([value], fold)
        return []

    def rows(self, node: ast.expr) -> Sequence[ast.expr]:
        """Elements of a literal list or tuple, or of a module's named one that is read nowhere else."""
        if isinstance(node, ast.Name) and self._scope(self._tree).names[node.id] == 2:
            found = self._assigned.get(node.id, [])
            node = found[0] if len(found) == 1 else node
        return node.elts if isinstance(node, (ast.List, ast.Tuple)) else []


def _compared(node: ast.AST, values: Values) -> Iterator[tuple[ast.Name, bool]]:
    """Names that are a whole side of the comparison of an assertion: whether the comparison has a tolerance."""
    sides: Sequence[ast.expr] = []
    near = False
    if (condition := _condition(node)) is not None:
        if (close := _near(*condition, values)) is not None:
            sides, near = close[1:3], True
        elif (compared := _sides(*condition)) is not None:
            sides = compared[1:]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and last(node.value.func) in _UNITTEST:
        sides, near = node.value.args[:2], last(node.value.func) == "assertAlmostEqual"
    for side in sides:
        approx = isinstance(side, ast.Call) and last(side.func) == "approx" and bool(side.args)
        inner = side.args[0] if isinstance(side, ast.Call) and approx else side
        if isinstance(inner, ast.Name):
            yield inner, near or approx


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


def column(target: ast.expr, name: str, rows: Sequence[ast.expr], fold: _Fold = lambda cell: cell) -> list[ast.expr]:
    """Literal cells of a table that a loop assigns to this name; empty if one is no literal."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return []
    places = [index for index, each in enumerate(target.elts) if isinstance(each, ast.Name) and each.id == name]
    if len(places) != 1:
        return []
    cells = [_unpacked(row) for row in rows]
    if any(len(cell) != len(target.elts) for cell in cells):
        return []
    return _literals([cell[places[0]] for cell in cells], fold)


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
    return (rel, near) if all(each is None or is_number(each) for each in (rel, near)) else None


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
        return (0.0, float(delta)) if places is None and is_number(delta) else None
    places = 7 if places is None else places
    return (0.0, 0.5 * 10.0**-places) if type(places) is int and abs(places) < sys.float_info.max_10_exp else None
