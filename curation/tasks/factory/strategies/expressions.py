"""Edits of expressions, after mutmut's operators. An operator yields (start, end, text) for one node."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from curation.tasks.factory.functions import Source

Found = Iterator[tuple[int, int, str]]
Operator = Callable[[Source, Any], Found]
_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_REVERSED = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}
_ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.BitXor: (r"\^", "&"),
}
_TWINS = {
    "lower": "upper",
    "lstrip": "rstrip",
    "find": "rfind",
    "index": "rindex",
    "split": "rsplit",
    "partition": "rpartition",
    "ljust": "rjust",
    "startswith": "endswith",
    "append": "extend",
    "min": "max",
    "any": "all",
    "keys": "values",
    "popleft": "pop",
    "appendleft": "append",
    "union": "intersection",
    "removeprefix": "removesuffix",
    "setdefault": "get",
    "ceil": "floor",
}
_OTHER_NAME = _TWINS | {other: name for name, other in _TWINS.items() if other not in ("append", "pop", "get")}


def change_comparison(source: Source, node: ast.Compare) -> Found:
    """Another comparison: its bound, or its negation."""
    for gap, operator in _comparisons(source, node):
        pattern, other = _COMPARISONS[type(operator)]
        yield from _in_gap(source, gap, pattern, other)


def reverse_comparison(source: Source, node: ast.Compare) -> Found:
    """The comparison in the other direction."""
    for gap, operator in _comparisons(source, node):
        if type(operator) in _REVERSED:
            yield from _in_gap(source, gap, _COMPARISONS[type(operator)][0], _REVERSED[type(operator)])


def change_operator(source: Source, node: ast.BinOp) -> Found:
    """Another arithmetic or bitwise operator."""
    if type(node.op) in _ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
        gap = source.span(node.left)[1], source.span(node.right)[0]
        yield from _in_gap(source, gap, *_ARITHMETIC[type(node.op)])


def swap_operands(source: Source, node: ast.BinOp) -> Found:
    """The operands of an operator that does not commute, exchanged."""
    if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Add)) and not _is_text(node.left):
        left, right = source.span(node.left), source.span(node.right)
        between = source.data[left[1] : right[0]].decode()
        yield left[0], right[1], f"{source.text(node.right)}{between}{source.text(node.left)}"


def drop_operand(source: Source, node: ast.BinOp) -> Found:
    """Only one side of an operator."""
    yield (*source.span(node), source.text(node.left))
    yield (*source.span(node), source.text(node.right))


def change_logic(source: Source, node: ast.BoolOp) -> Found:
    """`and` for `or`, and the reverse."""
    word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in pairwise(node.values):
        yield from _in_gap(source, (source.span(left)[1], source.span(right)[0]), word, other)


def drop_condition(source: Source, node: ast.BoolOp) -> Found:
    """One operand of `and` or `or` less."""
    for left, right in pairwise(node.values):
        yield source.span(left)[1], source.span(right)[1], ""
    yield source.span(node.values[0])[0], source.span(node.values[1])[0], ""


def drop_not(source: Source, node: ast.UnaryOp) -> Found:
    """A negation or a sign less."""
    if not isinstance(node.op, ast.UAdd):
        yield (*source.span(node), source.text(node.operand))


def change_number(source: Source, node: ast.Constant) -> Found:
    """A number beside it."""
    if type(node.value) is int:
        yield (*source.span(node), str(node.value + 1))
        if node.value > 1:
            yield (*source.span(node), str(node.value - 1))
    elif type(node.value) is float:
        yield (*source.span(node), repr(node.value + 1))


def change_text(source: Source, node: ast.Constant) -> Found:
    """Another text."""
    text = source.text(node)
    if isinstance(node.value, str) and text[-1:] in "\"'" and "\n" not in text and node.value.isprintable():
        match = re.fullmatch(r"([rbuRBU]*)(\"\"\"|'''|\"|')(.*)\2", text)
        if match and not match[3].startswith("\\"):
            yield (*source.span(node), f"{match[1]}{match[2]}{match[3][1:] if match[3] else 'x'}{match[2]}")


def change_constant(source: Source, node: ast.Constant) -> Found:
    """True for False, and the reverse."""
    if isinstance(node.value, bool):
        yield (*source.span(node), str(not node.value))


def drop_argument(source: Source, node: ast.Call) -> Found:
    """One argument of a call less."""
    parts = sorted([*map(source.span, node.args), *map(source.span, node.keywords)])
    for number, (start, end) in enumerate(parts):
        if number + 1 < len(parts):
            yield start, parts[number + 1][0], ""
        elif number:
            yield parts[number - 1][1], end, ""
        elif not isinstance(node.args[0] if node.args else None, ast.GeneratorExp):
            yield start, end, ""


def argument_none(source: Source, node: ast.Call) -> Found:
    """None for an argument of a call."""
    for each in node.args:
        if not isinstance(each, (ast.Starred, ast.GeneratorExp)):
            yield (*source.span(each), "None")
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield (*source.span(keyword.value), "None")


def swap_arguments(source: Source, node: ast.Call) -> Found:
    """Two neighbouring arguments of a call, exchanged."""
    for left, right in pairwise(node.args):
        if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
            (start, middle), (then, end) = source.span(left), source.span(right)
            yield start, end, f"{source.text(right)}{source.data[middle:then].decode()}{source.text(left)}"


def unwrap_call(source: Source, node: ast.Call) -> Found:
    """The only argument of a call instead of the call."""
    if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], (ast.Starred, ast.GeneratorExp)):
        yield (*source.span(node), source.text(node.args[0]))
    elif isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        yield (*source.span(node), source.text(node.func.value))


def change_method(source: Source, node: ast.Call) -> Found:
    """A function or method with the opposite effect."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in _OTHER_NAME:
        end = source.span(node.func)[1]
        yield end - len(name), end, _OTHER_NAME[name]


def swap_branches(source: Source, node: ast.IfExp) -> Found:
    """The values of a conditional expression, exchanged."""
    start, end = source.span(node)
    middle = source.data[source.span(node.body)[1] : source.span(node.orelse)[0]].decode()
    yield start, end, f"{source.text(node.orelse)}{middle}{source.text(node.body)}"


def drop_filter(source: Source, node: ast.comprehension) -> Found:
    """A comprehension without its condition."""
    last = node.iter
    for each in node.ifs:
        yield source.span(last)[1], source.span(each)[1], ""
        last = each


def change_slice(source: Source, node: ast.Slice) -> Found:
    """A slice without one of its bounds."""
    for bound in (node.lower, node.upper, node.step):
        if bound is not None:
            yield (*source.span(bound), "")


def lambda_none(source: Source, node: ast.Lambda) -> Found:
    """A lambda that returns None."""
    yield (*source.span(node.body), "None")


def _comparisons(source: Source, node: ast.Compare) -> Iterator[tuple[tuple[int, int], ast.cmpop]]:
    sides = [node.left, *node.comparators]
    for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
        yield (source.span(left)[1], source.span(right)[0]), operator


def _in_gap(source: Source, gap: tuple[int, int], pattern: str, other: str) -> Found:
    """Replace an operator between two operands."""
    match = re.search(pattern.encode(), source.data[gap[0] : gap[1]])
    if match:
        yield gap[0] + match.start(), gap[0] + match.end(), other


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


EXPRESSIONS: tuple[tuple[tuple[type[ast.AST], ...], tuple[Operator, ...]], ...] = (
    ((ast.Compare,), (change_comparison, reverse_comparison)),
    ((ast.BinOp,), (change_operator, swap_operands, drop_operand)),
    ((ast.BoolOp,), (change_logic, drop_condition)),
    ((ast.UnaryOp,), (drop_not,)),
    ((ast.Constant,), (change_number, change_text, change_constant)),
    ((ast.Call,), (drop_argument, argument_none, swap_arguments, unwrap_call, change_method)),
    ((ast.IfExp,), (swap_branches,)),
    ((ast.comprehension,), (drop_filter,)),
    ((ast.Slice,), (change_slice,)),
    ((ast.Lambda,), (lambda_none,)),
)
"""Operators by the kind of node that they change."""
