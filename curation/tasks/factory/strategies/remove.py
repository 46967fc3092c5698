"""Strategy `remove`: a function without its body, or with all the helpers that only it reaches, to be written anew."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from curation.tasks.factory.functions import Function
from curation.tasks.factory.strategies import Candidate, Context, Edit

_SHORTEST = 2
"""Statements in a body that is worth removing."""


def candidates(context: Context) -> Iterator[Candidate]:
    """One candidate for each function, and one for each function with helpers of its own."""
    by_name = {function.qualname: function for function in context.functions}
    users = _users(context.functions)
    for function in context.functions:
        body = _emptied(function)
        if body is None:
            continue
        yield Candidate("remove", "remove_body", function.key, (body,))
        helpers = [
            each
            for name in sorted(_names(function))
            if (each := by_name.get(name)) is not None
            and each.source.path == function.source.path
            and each is not function
            and users.get(name) == {function.key}
            and name.startswith("_")
        ]
        edits = [edit for each in helpers if (edit := _emptied(each)) is not None]
        if edits:
            names = [each.qualname for each in helpers]
            yield Candidate("remove", "remove_reach", function.key, (body, *edits), {"helpers": names})


def _emptied(function: Function) -> Edit | None:
    body = function.body
    if not body or body[0].lineno == function.node.lineno:
        return None
    if len(body) < _SHORTEST and not isinstance(body[0], (ast.If, ast.For, ast.While, ast.Try, ast.With)):
        return None
    return Edit(function.source.path, *function.body_span, "raise NotImplementedError")


def _names(function: Function) -> set[str]:
    return {node.id for node in ast.walk(function.node) if isinstance(node, ast.Name)}


def _users(functions: Sequence[Function]) -> dict[str, set[str]]:
    """Functions that read each name; `""` stands for code outside of functions."""
    users: dict[str, set[str]] = {}
    for function in functions:
        for name in _names(function):
            users.setdefault(name, set()).add(function.key)
    for source in {function.source.path: function.source for function in functions}.values():
        inside = [(each.first, each.last) for each in source.functions]
        for node in ast.walk(source.module):
            if isinstance(node, ast.Name) and not any(first <= node.lineno <= last for first, last in inside):
                users.setdefault(node.id, set()).add("")
    return users
