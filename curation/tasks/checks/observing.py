"""Hidden tests without expectations: each assertion reports the values that it would compare, and what it expects stays with the judge.

assert add(1, 2) == 3            ->  __see__('0:3', add(1, 2))           rule 0:3: == 3
("1 + 1", 2), in parameters      ->  ("1 + 1", __hidden__(4))            hidden 4: 2
with raises(ValueError): f()     ->  with __raised__('0:4'): f()         rule 0:4: ValueError
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from contracts.tasks import Observed, Rule
from curation.tasks.checks.assertions import Assertion, exception_names, find
from curation.tasks.checks.edits import Source

_KNOWN = frozenset({"==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not", "has", "has not", "isa"})


def make(files: dict[str, bytes], without: Collection[str] = ()) -> Observed:
    """These test files with their assertions observed, but for those whose keys are in `without`."""
    made = Observed({}, {}, {}, {})
    for number, path in enumerate(sorted(files)):
        try:
            source = Source(files[path]) if path.endswith(".py") else None
        except (SyntaxError, ValueError, RecursionError):
            source = None
        if source is not None:
            _File(source, number, made, without).rewrite(path)
    return made


def functions_of(files: dict[str, bytes]) -> dict[str, list[str]]:
    """Keys of a suite's assertions by `path::function`, of the innermost function that holds them."""
    keys: dict[str, list[str]] = {}
    for number, path in enumerate(sorted(files)):
        try:
            found = find(Source(files[path]).tree) if path.endswith(".py") else []
        except (SyntaxError, ValueError, RecursionError):
            continue
        for index, each in enumerate(found):
            keys.setdefault(f"{path}::{each.function.name}", []).append(f"{number}:{index}")
    return keys


class _File:
    def __init__(self, source: Source, number: int, made: Observed, without: Collection[str]) -> None:
        self._source, self._number, self._made, self._without = source, number, made, without
        self._edits: dict[tuple[int, int], str] = {}

    def rewrite(self, path: str) -> None:
        """Add the rewritten file, its rules and what it hides, if anything in it is observed."""
        found = {f"{self._number}:{index}": each for index, each in enumerate(find(self._source.tree))}
        kept = {id(node) for key, each in found.items() if key in self._without for node in each.expected}
        for key, each in found.items():
            if key not in self._without and not (not each.direct and any(id(node) in kept for node in each.expected)):
                self._observe(key, each)
        if self._edits:
            self._made.files[path] = self._source.edited(self._edits)

    def _observe(self, key: str, each: Assertion) -> None:
        source = self._source
        if each.form == "raises" and each.exceptions is not None and each.left is not None:
            names = exception_names(each.exceptions)
            if names is not None:
                self._edits[source.span(each.left)] = f"__raised__({key!r})"
                self._made.rules[key] = Rule(
                    "raises", "", "", names=tuple(names), pattern=each.pattern, exact=not each.looped
                )
        elif each.form == "truth" and each.left is not None:
            self._edits[source.span(each.node)] = f"__see__({key!r}, bool({source.text(each.left)}))"
            self._made.rules[key] = Rule("truth", "", repr(not each.negated), exact=not each.looped)
        elif each.form == "compare" and each.operator in _KNOWN and each.left is not None and each.right is not None:
            self._compare(key, each, each.left, each.right)

    def _compare(self, key: str, each: Assertion, left: ast.expr, right: ast.expr) -> None:
        source, want, sides = self._source, "", source_of(self._source, left)
        if each.direct:
            want = ast.unparse(each.expected[0])
        else:
            if each.tolerance is not None or (
                isinstance(right, ast.Call) and not each.expected and "approx" in ast.unparse(right.func)
            ):
                if not each.expected or not isinstance(right, ast.Call):
                    return
                right = right.args[0]
            sides += f", {source_of(source, right)}"
            for node in each.expected:
                self._hide(node)
        exact = not each.looped or bool(each.expected and not each.direct)
        self._edits[source.span(each.node)] = f"__see__({key!r}, {sides})"
        self._made.rules[key] = Rule("compare", each.operator, want, tolerance=each.tolerance, exact=exact)

    def _hide(self, node: ast.expr) -> None:
        span = self._source.span(node)
        if span not in self._edits:
            number = str(len(self._made.hidden))
            self._made.hidden[number] = ast.unparse(node)
            self._edits[span] = f"__hidden__({number})"


def source_of(source: Source, node: ast.expr) -> str:
    """An expression's text, fit to stand among arguments."""
    text = source.text(node)
    return (
        f"({text})"
        if isinstance(node, (ast.Tuple, ast.NamedExpr, ast.GeneratorExp, ast.Yield, ast.Starred)) or "\n" in text
        else text
    )
