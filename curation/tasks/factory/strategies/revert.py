"""Strategy `revert`: functions as they were in an older version, or before a commit, put into the present one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from curation.tasks.factory.functions import Function, Source
from curation.tasks.factory.strategies import Candidate, Context, Edit, changed_text, normalized


def candidates(context: Context) -> Iterator[Candidate]:
    """One candidate for each function whose older version differs. Without an older version there is none."""
    older = context.older
    if older is None:
        return
    for function in context.functions:
        before = _same(function, older.get(function.source.path))
        if before is None or normalized(before.text) == normalized(changed_text(function, ())):
            continue
        start, end = function.source.starts[function.first - 1], function.source.starts[function.last] - 1
        edit = Edit(function.source.path, start, end, before.text)
        yield Candidate("revert", "revert_function", function.key, (edit,))


def _same(function: Function, data: bytes | None) -> Function | None:
    """The function of the same name in an older file."""
    if data is None:
        return None
    try:
        source = Source(function.source.path, data, ast.parse(data.decode()))
    except (SyntaxError, ValueError):
        return None
    return next((each for each in source.functions if each.qualname == function.qualname), None)
