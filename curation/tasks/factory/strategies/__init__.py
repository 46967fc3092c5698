"""Strategies: ways to put bugs into a repository. Others can be installed as entry points `triplane.strategies`.

A strategy is a callable that gets a `Context` and yields `Candidate`s: edits of product files. Neither needs to break a
test: the screen finds out.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from contracts.digests import digest_of, sha256
from contracts.syntax import parse_python
from curation.errors import TaskError
from curation.tasks.factory.functions import Function, FunctionNode, Lines
from curation.tasks.factory.source import Repository
from curation.tasks.importing.trees import Tree

GROUP = "triplane.strategies"
_OWN = ("mutate", "remove", "revert")
"""Strategies of this package; they need no installed entry point."""


@dataclass(frozen=True)
class Edit:
    """Replaces bytes of a file."""

    path: str
    start: int
    """Byte offset in the repository's file."""
    end: int
    """Byte offset after the replaced bytes."""
    text: str

    @property
    def span(self) -> tuple[int, int]:
        """Byte offsets of what is replaced: start and end."""
        return self.start, self.end


@dataclass(frozen=True)
class Candidate:
    """A bug that may be: edits of one function, or of several for strategies that combine."""

    strategy: str
    operator: str
    """Kind of the edit, for caps and the card."""
    function: str
    """path::qualname of the changed function; of the first one if there are several."""
    edits: tuple[Edit, ...]
    """All of them change the function's file, since splits are dealt by file. They do not overlap."""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def identity(self) -> str:
        """Digest of the edits; equal only for equal states."""
        return digest_of([[each.path, each.start, each.end, each.text] for each in self.edits])

    @property
    def path(self) -> str:
        """File of the function."""
        return self.function.split("::", 1)[0]

    def apply(self, tree: Tree) -> Tree:
        """`tree` with the edits."""
        changed = dict(tree)
        for each in sorted(self.edits, key=lambda edit: -edit.start):
            data = changed[each.path]
            changed[each.path] = data[: each.start] + each.text.encode() + data[each.end :]
        return changed

    def to_row(self) -> list[Any]:
        """JSON of a candidate."""
        edits = [[each.path, each.start, each.end, each.text] for each in self.edits]
        return [self.strategy, self.operator, self.function, edits, dict(self.meta)]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Candidate:
        """Candidate of `to_row`."""
        return cls(row[0], row[1], row[2], tuple(Edit(*edit) for edit in row[3]), row[4])


@dataclass(frozen=True)
class Context:
    """What strategies get."""

    repository: Repository
    functions: Sequence[Function]
    """Outermost functions of the product that tests run."""
    lines: Lines
    seed: int
    most: int = 60
    """Largest number of candidates of a function that are useful."""
    older: Tree | None = None
    """Files of an older version, if one is named."""
    unused: dict[str, str] = field(default_factory=dict)
    """Files, functions and commits without a candidate, with the reason; strategies add to it."""


Strategy = Callable[[Context], Iterable[Candidate]]


def strategy_named(name: str) -> Strategy:
    """An installed strategy. Raises TaskError."""
    known = {each.name: each for each in entry_points(group=GROUP)} | {
        each: EntryPoint(each, f"{__name__}.{each}:candidates", GROUP) for each in _OWN
    }
    if name not in known:
        choice = ", ".join(sorted({*known, "combine", "rewrite", "feature"}))
        raise TaskError(f"no strategy is called {name!r}: choose of {choice}")
    try:
        strategy: Strategy = known[name].load()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"the strategy {name} ({known[name].value}) can't be loaded: {error}") from error
    return strategy


def installed_strategies(names: Iterable[str]) -> dict[str, str]:
    """Digest of each strategy that another package provides, by name. It covers the version of the distribution and the
    source of the module that defines the strategy.
    """
    found = {each.name: each for each in entry_points(group=GROUP) if each.name not in _OWN}
    digests = {}
    for name in sorted(found.keys() & set(names)):
        spec, distribution = find_spec(found[name].module), found[name].dist
        source = Path(spec.origin) if spec and spec.origin else Path()
        code = source.read_bytes() if source.is_file() else b""
        version = distribution.version if distribution else ""
        digests[name] = digest_of([found[name].value, version, sha256(code)])
    return digests


def changed_text(function: Function, edits: Iterable[Edit]) -> str:
    """Lines of a function, decorators included, with the edits that lie in it."""
    source = function.source
    start, end = source.starts[function.first - 1], source.starts[function.last] - 1
    data = source.data[start:end]
    for each in sorted(edits, key=lambda edit: -edit.start):
        if each.path == source.path and start <= each.start and each.end <= end:
            data = data[: each.start - start] + each.text.encode() + data[each.end - start :]
    return data.decode()


def normalized(text: str) -> str | None:
    """Syntax of a function's lines without positions and docstring; None if they are not one function, or nested too
    deeply.
    """
    try:
        body = parse_python("if 1:\n" + text if text[:1].isspace() else text).body
    except (SyntaxError, ValueError):
        return None
    node = body[0].body[0] if text[:1].isspace() and isinstance(body[0], ast.If) else body[0]
    if len(body) != 1 or not isinstance(node, FunctionNode):
        return None
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    try:
        return ast.dump(node)
    except RecursionError:
        return None
