"""Rewrite hidden tests without expectations: each assertion reports its values, and the grader keeps the expectations.

assert add(1, 2) == 3            ->  __see__('0:3', add(1, 2))           rule 0:3: == 3
("1 + 1", 2), in parameters      ->  ("1 + 1", __hidden__(4))            hidden 4: 2
with raises(ValueError): f()     ->  with __raised__('0:4'): f()         rule 0:4: ValueError
assert abs(f(1) - 3) < 0.1       ->  __see__('0:5', abs(__plain__('0:5:0', f(1)) - 3))
WANT = {"a": 1}                  ->  {"a": __hidden__(5)}
assert f() == GOLDEN.read_text() ->  __see__('0:6', f())                 rule 0:6: == the file's text

Hidden files that only expectations read are not placed in the sandbox of the observed run.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from contracts.syntax import is_deep
from contracts.tasks import Observed, Rule
from curation.tasks.checks.assertions import KINDS, Assertion, exception_names, find
from curation.tasks.checks.edits import Source
from curation.tasks.checks.mentions import mentioned
from curation.tasks.checks.scopes import last
from curation.tasks.checks.values import MOST_LEVELS, Values, literal

UNOPENED = "__import__('contextlib').nullcontext()"
"""In place of opening a file for an expectation."""
_METHODS = frozenset(name for kind in KINDS for name in dir(getattr(builtins, kind)))
_OF_CLASS = frozenset({"ascii", "callable", "format", "getattr", "hasattr", "isinstance", "repr", "str", "type"})
"""Builtin functions whose result depends on the class of an argument."""
_KNOWN = frozenset({"==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not", "has", "has not", "isa", "near"})


def make(
    files: dict[str, bytes],
    without: Collection[str] = (),
    *,
    tables: bool = True,
    plain: bool = True,
    data: Mapping[str, bytes] | None = None,
) -> Observed:
    """Observed versions of these test files, except for assertions whose keys are in `without`.

    tables: hide the values of dictionaries in the files. plain: strip values in assertions' computations of their own
    methods. data: other hidden files, which may be expectations.
    """
    data = dict(data or {})
    while True:
        made, read = _made(files, without, tables, plain, data)
        still = mentioned({**files, **made.files}, read)
        if not still:
            return replace(made, removed=tuple(sorted(read)))
        data = {path: content for path, content in data.items() if path not in still}


def _made(
    files: dict[str, bytes], without: Collection[str], tables: bool, plain: bool, data: Mapping[str, bytes]
) -> tuple[Observed, set[str]]:
    """Observed versions, and the hidden files whose content they lack."""
    made, read = Observed({}, {}, {}, {}), set[str]()
    for number, path in enumerate(sorted(files)):
        try:
            source = Source(files[path]) if path.endswith(".py") else None
        except (SyntaxError, ValueError):
            source = None
        if source is not None:
            file = _File(source, Values(source.tree, path, data), number, made, without, tables, plain)
            file.rewrite(path)
            read |= file.read
    return made, read


def functions_of(files: dict[str, bytes]) -> dict[str, list[str]]:
    """Keys of a suite's assertions by `path::function` of the innermost function that contains them."""
    keys: dict[str, list[str]] = {}
    for number, path in enumerate(sorted(files)):
        try:
            found = find(Source(files[path]).tree) if path.endswith(".py") else []
        except (SyntaxError, ValueError):
            continue
        for index, each in enumerate(found):
            keys.setdefault(f"{path}::{each.function.name}", []).append(f"{number}:{index}")
    return keys


def drawn_functions(files: dict[str, bytes]) -> set[str]:
    """`path::function` of functions whose arguments Hypothesis draws, which see other values in every run."""
    found: set[str] = set()
    for path, data in files.items():
        try:
            tree = Source(data).tree if path.endswith(".py") else ast.Module([], [])
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                calls = [each.func for each in node.decorator_list if isinstance(each, ast.Call)]
                if any(getattr(each, "attr", getattr(each, "id", "")) == "given" for each in calls):
                    found.add(f"{path}::{node.name}")
    return found


class _File:
    def __init__(
        self,
        source: Source,
        values: Values,
        number: int,
        made: Observed,
        without: Collection[str],
        tables: bool,
        plain: bool,
    ) -> None:
        self._source, self._number, self._made, self._without = source, number, made, without
        self.values = values
        self._tables, self._plain = tables, plain
        self._edits: dict[tuple[int, int], str] = {}
        self._parts: Counter[str] = Counter()
        self.read: set[str] = set()
        """Hidden files whose content was removed from it."""

    def rewrite(self, path: str) -> None:
        """Add the rewritten file, its rules and hidden values, if it has an observed assertion."""
        found = {f"{self._number}:{index}": each for index, each in enumerate(find(self._source.tree, self.values))}
        without = {key for key, each in found.items() if key in self._without or is_deep(each.node, MOST_LEVELS)}
        span = self._source.span
        kept = {span(node) for key in without for node in found[key].expected}
        for key, each in found.items():
            if key not in without and not (not each.direct and any(span(node) in kept for node in each.expected)):
                self._observe(key, each)
        if self._tables and self._edits:
            for value in _table_values(self._source.tree):
                self._hide(value)
        if self._edits:
            self._made.files[path] = self._source.edited(self._edits)

    def _observe(self, key: str, each: Assertion) -> None:
        source = self._source
        if each.form == "raises" and each.exceptions is not None and each.left is not None:
            names = exception_names(each.exceptions)
            if names is not None:
                self._edits[source.span(each.left)] = f"__raised__({key!r})"
                self._made.rules[key] = Rule(
                    "raises", "", "", names=tuple(names), pattern=each.pattern, exact=each.counted
                )
        elif each.form == "truth" and each.left is not None:
            self._edits[source.span(each.node)] = f"__see__({key!r}, bool({self._text(key, each.left, inside=True)}))"
            self._made.rules[key] = Rule("truth", "", repr(not each.negated), exact=each.counted)
        elif each.form == "compare" and each.operator in _KNOWN and each.left is not None and each.right is not None:
            self._compare(key, each, each.left, each.right)

    def _compare(self, key: str, each: Assertion, left: ast.expr, right: ast.expr) -> None:
        want, sides = "", self._text(key, left)
        if each.direct:
            want = ast.unparse(each.expected[0])
        else:
            approx = isinstance(right, ast.Call) and last(right.func) == "approx"
            if not each.expected and (approx or each.tolerance is not None):
                return
            if isinstance(right, ast.Call) and approx:
                right = right.args[0]
            sides += f", {self._text(key, right)}"
            for node in each.expected:
                self._hide(node)
        for read in (read for part in each.reads for read in part):
            self.read.add(read.path)
            if read.opened is not None:
                self._edits[self._source.span(read.opened)] = UNOPENED
        self._edits[self._source.span(each.node)] = f"__see__({key!r}, {sides})"
        self._made.rules[key] = Rule("compare", each.operator, want, tolerance=each.tolerance, exact=each.counted)

    def _text(self, key: str, node: ast.expr, *, inside: bool = False) -> str:
        """Text of an expression as an argument, with hidden and plain parts as configured. inside: the expression
        itself is part of a computation.
        """
        changed = _Parts(self, key, node if not inside else None) if self._plain or self._tables else None
        found = changed.visit(copy.deepcopy(node)) if changed else node
        if changed is None or not changed.changed:
            return source_of(self._source, node)
        try:
            return f"({ast.unparse(found)})"
        except ValueError:  # it has an integer of too many digits, or a string within an f-string
            return source_of(self._source, node)

    def hidden(self, node: ast.expr) -> str:
        """Number for a hidden value."""
        number = str(len(self._made.hidden))
        self._made.hidden[number] = ast.unparse(node)
        return number

    def kind(self, key: str) -> str:
        """Key of a value in an assertion's computation."""
        part = f"{key}:{self._parts[key]}"
        self._parts[key] += 1
        self._made.rules[part] = Rule("kind", "", "", exact=False)
        return part

    @property
    def strips(self) -> bool:
        """Whether values are stripped of methods."""
        return self._plain

    @property
    def hides_tables(self) -> bool:
        """Whether dictionaries' values are hidden."""
        return self._tables

    def _hide(self, node: ast.expr) -> None:
        span = self._source.span(node)
        if span not in self._edits:
            self._edits[span] = f"__hidden__({self.hidden(node)})"


class _Parts(ast.NodeTransformer):
    """Parts of a compared expression: calls in its computation, functions of `math`, and subscripted dictionaries."""

    def __init__(self, file: _File, key: str, top: ast.expr | None) -> None:
        self._file, self._key = file, key
        self._top = None if top is None else (top.lineno, top.col_offset, top.end_lineno, top.end_col_offset)
        self._reached: set[int] = set()
        """Expressions of which an attribute, an item, the class or the text is read: their own class knows these."""
        self.changed = False

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if (found := self._computed(node)) is not None:
            return found
        if node.attr not in _METHODS:
            self._reached.add(id(node.value))
        self.generic_visit(node)
        return node

    def _computed(self, node: ast.expr) -> ast.expr | None:
        """The literal of a constant or function of `math`, which code under test could replace."""
        found = self._file.values.folded(node, None)
        if found is node or self._file.values.reads(found):
            return None
        self.changed = True
        return found

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (found := self._computed(node)) is not None:
            return found
        if isinstance(node.func, ast.Name) and node.func.id in _OF_CLASS:
            self._reached |= set(map(id, node.args))
        self.generic_visit(node)
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        builtin = isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
        if not self._file.strips or builtin or place == self._top or id(node) in self._reached:
            return node
        self.changed = True
        key = ast.Constant(self._file.kind(self._key))
        return ast.copy_location(ast.Call(ast.Name("__plain__", ast.Load()), [key, node], []), node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self._reached.add(id(node.value))
        self.generic_visit(node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self._reached.add(id(node.value))
        self.generic_visit(node)
        if self._file.hides_tables and isinstance(node.value, ast.Dict) and literal(node.value):
            self.changed = True
            node.value.values = [
                ast.Call(ast.Name("__hidden__", ast.Load()), [ast.Constant(int(self._file.hidden(each)))], [])
                for each in node.value.values
            ]
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return node


def _table_values(tree: ast.Module) -> list[ast.expr]:
    """Values of dictionaries with a name in the module, or returned by functions that are not tests."""
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("test"):
            tables += [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    return [value for table in tables if isinstance(table, ast.Dict) and literal(table) for value in table.values]


def source_of(source: Source, node: ast.expr) -> str:
    """Text of an expression, usable as an argument."""
    text = source.text(node)
    return (
        f"({text})"
        if isinstance(node, (ast.Tuple, ast.NamedExpr, ast.GeneratorExp, ast.Yield, ast.Starred)) or "\n" in text
        else text
    )
