"""Strategy `mutate`: small edits of expressions and statements.

Expressions are changed as mutmut does, statements as SWE-smith's procedural modifications do. An edit replaces only the
text of the syntax that it changes, so that comments and formatting stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice, zip_longest
from random import Random

from curation.tasks.factory.functions import Function
from curation.tasks.factory.strategies import Candidate, Context, Edit, changed_text, normalized
from curation.tasks.factory.strategies.expressions import EXPRESSIONS
from curation.tasks.factory.strategies.statements import STATEMENTS


def candidates(context: Context) -> Iterator[Candidate]:
    """Edits of every function, at most `context.most` of each."""
    for function in context.functions:
        yield from islice(mutants(function, context.seed), context.most)


def mutants(function: Function, seed: int) -> Iterator[Candidate]:
    """Edits of one function, each another program. Operators take turns; an operator's edits come in random order."""
    seen = {normalized(changed_text(function, ()))}
    by_operator: dict[str, list[Edit]] = {}
    for operator, start, end, text in _edits(function):
        by_operator.setdefault(operator, []).append(Edit(function.source.path, start, end, text))
    names = sorted(by_operator)
    rng = Random(f"mutate/{seed}/{function.key}")
    rng.shuffle(names)
    for name in names:
        rng.shuffle(by_operator[name])
    for turn in zip_longest(*(by_operator[name] for name in names)):
        for name, edit in zip(names, turn, strict=True):
            syntax = None if edit is None else normalized(changed_text(function, [edit]))
            if edit is not None and syntax is not None and syntax not in seen:
                seen.add(syntax)
                yield Candidate("mutate", name, function.key, (edit,))


def _edits(function: Function) -> Iterator[tuple[str, int, int, str]]:
    for node in _nodes(function):
        for kinds, operators in (*EXPRESSIONS, *STATEMENTS):
            if isinstance(node, kinds):
                for operator in operators:
                    for start, end, text in operator(function.source, node):
                        yield operator.__name__, start, end, text


def _nodes(function: Function) -> Iterator[ast.AST]:
    """Nodes of signature and body in order, without docstring, annotations and formatted strings."""
    yield from _walk(function.node.args)
    yield function.node
    for statement in function.body:
        yield from _walk(statement)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr):  # Python 3.11 gives wrong positions inside
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)
