"""Edits of statements, after SWE-smith's modifications. An operator yields (start, end, text) for one node."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise

from curation.tasks.factory.functions import Source
from curation.tasks.factory.strategies.expressions import Found, Operator

_PLAIN = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Delete, ast.Raise, ast.Assert)
_ASSIGNED = {
    ast.Add: "-=",
    ast.Sub: "+=",
    ast.Mult: "//=",
    ast.Div: "*=",
    ast.FloorDiv: "*=",
    ast.BitOr: "&=",
    ast.BitAnd: "|=",
}


def drop_statement(source: Source, node: ast.stmt) -> Found:
    """One statement less."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield (*source.span(node), "pass")


def drop_block(source: Source, node: ast.If | ast.For | ast.While) -> Found:
    """A condition or a loop less, with its body."""
    if not _is_elif(source, node):
        yield (*source.span(node), "pass")


def negate_condition(source: Source, node: ast.If | ast.While) -> Found:
    """The opposite condition."""
    yield (*source.span(node.test), f"not ({source.text(node.test)})")


def fix_condition(source: Source, node: ast.If) -> Found:
    """A condition that always holds, or never."""
    yield (*source.span(node.test), "True")
    yield (*source.span(node.test), "False")


def swap_bodies(source: Source, node: ast.If) -> Found:
    """The bodies of `if` and `else`, exchanged."""
    if node.orelse and not isinstance(node.orelse[0], ast.If):
        first, second = _block(source, node.body), _block(source, node.orelse)
        between = source.data[first[1] : second[0]].decode()
        texts = [source.data[start:end].decode() for start, end in (second, first)]
        yield first[0], second[1], f"{texts[0]}{between}{texts[1]}"


def drop_else(source: Source, node: ast.If | ast.For | ast.While) -> Found:
    """A statement without its `else`."""
    if node.orelse and not _is_elif(source, node.orelse[0]):
        yield _block(source, node.body)[1], _block(source, node.orelse)[1], ""


def unwrap_block(source: Source, node: ast.If | ast.For | ast.While | ast.With | ast.Try) -> Found:
    """The body of a block without the block."""
    if _is_elif(source, node) or node.body[0].lineno == node.lineno:
        return
    start, end = _block(source, node.body)
    surplus = node.body[0].col_offset - node.col_offset
    head, *lines = source.data[start:end].decode().split("\n")
    kept = [line[surplus:] if line[:surplus].isspace() else line for line in lines]
    yield (*source.span(node), "\n".join([head, *kept]))


def swap_statements(source: Source, node: ast.AST) -> Found:
    """Two neighbouring statements, exchanged."""
    for body in _bodies(node):
        for left, right in pairwise(body):
            if isinstance(left, _PLAIN) and isinstance(right, _PLAIN) and left.lineno != right.lineno:
                (start, middle), (then, end) = source.span(left), source.span(right)
                yield start, end, f"{source.text(right)}{source.data[middle:then].decode()}{source.text(left)}"


def change_assignment(source: Source, node: ast.AugAssign) -> Found:
    """Another operator of an augmented assignment, or a plain assignment."""
    gap = source.span(node.target)[1], source.span(node.value)[0]
    text = source.data[gap[0] : gap[1]].decode()
    if type(node.op) in _ASSIGNED:
        yield (*gap, text.replace(text.strip(), _ASSIGNED[type(node.op)], 1))
    yield (*gap, text.replace(text.strip(), "=", 1))


def assign_none(source: Source, node: ast.Assign) -> Found:
    """None for an assigned value."""
    yield (*source.span(node.value), "None")


def return_none(source: Source, node: ast.Return) -> Found:
    """No value for a returned one."""
    if node.value is not None:
        yield (*source.span(node.value), "None")


def change_jump(source: Source, node: ast.Break | ast.Continue) -> Found:
    """`break` for `continue`, and the reverse."""
    yield (*source.span(node), "continue" if isinstance(node, ast.Break) else "break")


def drop_iterations(source: Source, node: ast.For) -> Found:
    """A loop that ends after its first round."""
    start, end = _block(source, node.body)
    if not node.orelse and node.body[0].lineno != node.lineno:
        yield start, end, f"{source.data[start:end].decode()}\n{' ' * node.body[0].col_offset}break"


def change_default(source: Source, node: ast.arguments) -> Found:
    """None for the default of a parameter."""
    for each in (*node.defaults, *node.kw_defaults):
        if each is not None:
            yield (*source.span(each), "None")


def narrow_handler(source: Source, node: ast.ExceptHandler) -> Found:
    """A handler that catches another exception."""
    if node.type is not None:
        yield (*source.span(node.type), "MemoryError")


def _block(source: Source, body: Sequence[ast.stmt]) -> tuple[int, int]:
    return source.span(body[0])[0], source.span(body[-1])[1]


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list):
            yield found


def _is_elif(source: Source, node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and source.data[source.span(node)[0] :].startswith(b"elif")


STATEMENTS: tuple[tuple[tuple[type[ast.AST], ...], tuple[Operator, ...]], ...] = (
    (_PLAIN, (drop_statement,)),
    ((ast.If, ast.For, ast.While), (drop_block, drop_else)),
    ((ast.If, ast.While), (negate_condition,)),
    ((ast.If,), (fix_condition, swap_bodies)),
    ((ast.If, ast.For, ast.While, ast.With, ast.Try), (unwrap_block,)),
    ((ast.FunctionDef, ast.If, ast.For, ast.While, ast.With, ast.Try), (swap_statements,)),
    ((ast.AugAssign,), (change_assignment,)),
    ((ast.Assign,), (assign_none,)),
    ((ast.Return,), (return_none,)),
    ((ast.Break, ast.Continue), (change_jump,)),
    ((ast.For,), (drop_iterations,)),
    ((ast.arguments,), (change_default,)),
    ((ast.ExceptHandler,), (narrow_handler,)),
)
"""Operators by the kinds of nodes that they change."""
