"""Functions of a repository: where they stand in its files, and which tests run their lines."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from contracts.syntax import is_deep, parse_python
from curation.tasks.importing.trees import Tree

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NOT_PRODUCT = frozenset({"tests", "test", "testing", "docs", "doc", "examples", "benchmarks", "bench", "scripts"})
_NOT_PRODUCT_FILES = frozenset({"setup.py", "conftest.py", "versioneer.py", "noxfile.py", "_version.py"})


@dataclass(frozen=True, eq=False)
class Source:
    """A file of the product, parsed."""

    path: str
    data: bytes
    module: ast.Module

    @cached_property
    def starts(self) -> list[int]:
        """Byte offset of each line; the first has index 0."""
        starts = [0]
        for line in self.data.split(b"\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def offset(self, line: int, column: int) -> int:
        """Byte offset of a position as `ast` gives it."""
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Byte offsets of a node: start and end."""
        return (
            self.offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self.offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def text(self, node: ast.AST) -> str:
        """Source of a node."""
        start, end = self.span(node)
        return self.data[start:end].decode()

    @cached_property
    def functions(self) -> list[Function]:
        """Outermost functions: of the module and of its classes."""
        return list(_functions(self, self.module.body, ()))


@dataclass(frozen=True, eq=False)
class Function:
    """An outermost function: nested ones belong to it."""

    source: Source
    qualname: str
    node: FunctionNode

    @property
    def key(self) -> str:
        """path::qualname."""
        return f"{self.source.path}::{self.qualname}"

    @property
    def first(self) -> int:
        """Its first line, decorators included."""
        return first_line(self.node)

    @property
    def last(self) -> int:
        """Its last line."""
        return self.node.end_lineno or self.node.lineno

    @property
    def is_deep(self) -> bool:
        """Whether it is nested too deeply to be changed."""
        return is_deep(self.node)

    def encloses(self, path: str, start: int, end: int) -> bool:
        """Whether bytes of a file are part of its lines."""
        starts = self.source.starts
        return path == self.source.path and starts[self.first - 1] <= start and end <= starts[self.last]

    def overlaps(self, path: str, start: int, end: int) -> bool:
        """Whether its lines contain some of these bytes of a file. An empty range is a place of insertion."""
        starts = self.source.starts
        some = max(start, starts[self.first - 1]) < min(end, starts[self.last])
        return (path == self.source.path and some) or self.encloses(path, start, end)

    @property
    def body(self) -> list[ast.stmt]:
        """Statements after the docstring."""
        return self.node.body[1:] if ast.get_docstring(self.node, clean=False) is not None else self.node.body

    @property
    def body_span(self) -> tuple[int, int]:
        """Byte offsets of `body`, start and end; empty at the end of the function without statements."""
        if not self.body:
            return (self.source.span(self.node)[1],) * 2
        first = self.body[0]
        return self.source.offset(first_line(first), first.col_offset), self.source.span(self.body[-1])[1]

    @property
    def docstring(self) -> str:
        """Docstring, cleaned; empty without one."""
        return ast.get_docstring(self.node) or ""

    @property
    def text(self) -> str:
        """Its lines, decorators included."""
        lines = self.source.data.decode().split("\n")
        return "\n".join(lines[self.first - 1 : self.last])


def first_line(statement: ast.stmt) -> int:
    """Line at which a statement begins, from 1: a decorated function or class at its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def named_once(sources: Iterable[Source]) -> list[Function]:
    """Functions whose name no other function of their file has, such as the setter of a property."""
    functions = [function for source in sources for function in source.functions]
    counts = Counter(function.key for function in functions)
    return [function for function in functions if counts[function.key] == 1]


def product_sources(tree: Tree) -> tuple[list[Source], dict[str, str]]:
    """Parsed files of the product, by path; and the paths of those that are left out, with the reason."""
    found, unused = [], {}
    for path in sorted(filter(is_product_file, tree)):
        source = parsed(path, tree[path])
        if isinstance(source, str):
            unused[path] = source
        else:
            found.append(source)
    return found, unused


def parsed(path: str, data: bytes) -> Source | str:
    """A file, or the reason why none of its functions is changed."""
    if b"\r" in data:
        return "it has carriage returns"
    try:
        return Source(path, data, parse_python(data.decode()))
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except (SyntaxError, ValueError):
        return "this Python can't read it"


def is_test_file(path: str) -> bool:
    """Whether pytest collects a file of this name by default."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def is_product_file(path: str) -> bool:
    """Whether a file of this name is Python code of the product."""
    parts = PurePosixPath(path).parts
    product = not set(parts[:-1]) & _NOT_PRODUCT and parts[-1] not in _NOT_PRODUCT_FILES
    return product and path.endswith(".py") and not is_test_file(path)


def _functions(source: Source, body: Sequence[ast.stmt], classes: tuple[str, ...]) -> Iterator[Function]:
    left = [(node, classes) for node in reversed(body)]
    while left:
        node, classes = left.pop()
        if isinstance(node, FunctionNode):
            yield Function(source, ".".join([*classes, node.name]), node)
        elif isinstance(node, ast.ClassDef):
            left += [(each, (*classes, node.name)) for each in reversed(node.body)]
        elif isinstance(node, (ast.If, ast.Try)):
            inside = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            left += [(each, classes) for each in reversed(inside)]


class Lines:
    """Tests that run each line of the product, as coverage.py recorded them."""

    def __init__(self, recorded: Mapping[str, Mapping[str, object]]) -> None:
        """recorded: by path, "sets" of node ids and the number of the set of each line, in "lines"."""
        self._lines: dict[str, dict[int, frozenset[str]]] = {}
        for path, found in recorded.items():
            sets = [frozenset(each) for each in found["sets"]]  # type: ignore[attr-defined]
            lines = found["lines"].items()  # type: ignore[attr-defined]
            self._lines[path] = {int(line): sets[number] for line, number in lines}

    def tests(self, path: str, first: int, last: int) -> frozenset[str]:
        """Tests that run one of these lines."""
        lines = self._lines.get(path, {})
        names = frozenset[str]().union(*(lines.get(line, frozenset()) for line in range(first, last + 1)))
        return names - {""}

    def of_file(self, path: str) -> frozenset[str]:
        """Tests that run a line of a file."""
        return frozenset[str]().union(*self._lines.get(path, {}).values()) - {""}

    def imported(self, function: Function) -> bool:
        """Whether a line of a function's body ran outside of tests, as its module was imported."""
        lines = self._lines.get(function.source.path, {})
        start = function.node.body[0].lineno
        return any("" in lines.get(line, ()) for line in range(start, function.last + 1))
