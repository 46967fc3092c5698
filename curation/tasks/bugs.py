"""Generated bugs: modules that call each other in a chain, with a wrong operation in one line.

The operations, and so the kinds of bugs, are listed in `operations.py`: add another to `ARITHMETIC` or `COMPARISONS`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from contracts.digests import digest_of
from contracts.tasks import Split
from curation.tasks.cases import Chain
from curation.tasks.compositions import LENGTHS, Family, deal_chains, families_of, family_name
from curation.tasks.names import NAMES, function_names
from curation.tasks.operations import Operation, Place, places, trained

PATHS = ("app.py", "calc.py", "core.py", "main.py", "tool.py", "util.py")
MODULES = tuple(path.removesuffix(".py") for path in PATHS)
VISIBLE_TEST = "tests/test_visible.py"
_NO_NEWLINE = "\n\\ No newline at end of file\n"
_FILLERS = ("# small helpers", "# see the tests", "LIMIT = 9", "UNIT = 1", "import math")


@dataclass(frozen=True)
class Bug:
    """Chain of functions, one per module, from the innermost to the one in the instruction; one line is wrong."""

    chain: Chain
    """Correct operations of the functions."""
    index: int
    """Number of the wrong function, from 0."""
    wrong: Operation
    """Wrong operation of that function."""
    functions: tuple[str, ...]
    paths: tuple[str, ...]
    arguments: tuple[str, ...]
    """Argument names: one more than functions."""
    fillers: tuple[tuple[str, ...], ...]
    """Lines above each function, which shift its line numbers."""

    @cached_property
    def identity(self) -> str:
        """Digest of all random choices; equal only for equal bugs."""
        names = [*(each.name for each in self.chain), self.index, self.wrong.name]
        return digest_of([*names, *self.functions, *self.paths, *self.arguments, *map(list, self.fillers)])

    @property
    def place(self) -> Place:
        """Place of the wrong operation."""
        return places(len(self.chain))[self.index]

    @property
    def right(self) -> Operation:
        """Correct operation of the wrong line."""
        return self.chain[self.index]

    @property
    def family(self) -> str:
        """Place and correct operation."""
        return family_name((self.place, self.right))

    @property
    def task_id(self) -> str:
        """Readable name of the task."""
        return f"{self.family}-{self.identity[:12]}"

    @property
    def line(self) -> int:
        """Line number of the wrong line in its module, from 1."""
        return self.line_of(self.index)

    @property
    def path(self) -> str:
        """Module with the wrong line."""
        return self.paths[self.index]

    @property
    def instruction(self) -> str:
        """Instruction for the agent: the last function of the chain, and all operations."""
        steps = [f" {each.word} {name}" for each, name in zip(self.chain, self.arguments[1:], strict=True)]
        return f"fix {self.paths[-1]}: left to right, {self.functions[-1]} returns {self.arguments[0]}{''.join(steps)}"

    def line_of(self, index: int) -> int:
        """Line number of the return line of a function's module, from 1."""
        return len(self.fillers[index]) + (3 if index else 2)

    def answer(self, index: int, operation: Operation) -> str:
        """Line that applies `operation` in a function."""
        names = self.arguments[: index + 1]
        value = f"{self.functions[index - 1]}({', '.join(names)})" if index else names[0]
        return f"    return {value} {operation.symbol} {self.arguments[index + 1]}"

    def module(self, index: int, operation: Operation) -> str:
        """Text of a module with `operation` in its function."""
        head = [f"from {self.paths[index - 1].removesuffix('.py')} import {self.functions[index - 1]}"] if index else []
        signature = f"def {self.functions[index]}({', '.join(self.arguments[: index + 2])}):"
        return "\n".join([*self.fillers[index], *head, signature, self.answer(index, operation)]) + "\n"

    def modules(self, answer: Operation) -> dict[str, str]:
        """All modules by path, with `answer` in the wrong line."""
        return {
            path: self.module(index, answer if index == self.index else each)
            for index, (path, each) in enumerate(zip(self.paths, self.chain, strict=True))
        }


def draw_bug(family: Family, chains: Mapping[int, Sequence[Chain]], functions: Sequence[str], rng: Random) -> Bug:
    """Random bug of this family. chains: by length, with the family's operation in its place. functions: their
    names.
    """
    place, right = family
    length = rng.choice(sorted(chains))
    index = places(length).index(place)
    chain = rng.choice(chains[length])
    wrong = rng.choice([each for each in trained(place) if each is not right])
    names = rng.sample(functions, length)
    arguments = rng.sample([name for name in NAMES if name not in names], length + 1)
    fillers = tuple(tuple(rng.sample(_FILLERS, rng.randrange(2))) for _ in range(length))
    return Bug(chain, index, wrong, tuple(names), tuple(rng.sample(PATHS, length)), tuple(arguments), fillers)


def draw_bugs(count: int, split: Split, suite_seed: int, rng: Random, seen: set[str]) -> list[Bug]:
    """`count` bugs of a split whose identities are not in `seen`, which is extended; families alternate."""
    chains, functions = deal_chains(suite_seed)[split], function_names(suite_seed)[split]
    families = [(family, _chains_of(family, chains)) for family in families_of(split)]
    bugs: list[Bug] = []
    while len(bugs) < count:
        family, own = families[len(bugs) % len(families)]
        bug = draw_bug(family, own, functions, rng)
        if bug.identity not in seen:
            seen.add(bug.identity)
            bugs.append(bug)
    return bugs


def _chains_of(family: Family, chains: Sequence[Chain]) -> dict[int, list[Chain]]:
    """Chains with the family's operation in its place, by length."""
    place, right = family
    return {
        length: [each for each in chains if len(each) == length and each[places(length).index(place)] is right]
        for length in LENGTHS
        if place in places(length)
    }


def file_diff(path: str, before: str | None, after: str) -> bytes:
    """Patch of one text file in the format of `git diff --full-index`, without section headings. before: None for a new
    file.
    """
    head = [f"diff --git a/{path} b/{path}\n", "new file mode 100644\n" if before is None else ""]
    head.append(f"index {_blob(before)}..{_blob(after)}{'' if before is None else ' 100644'}\n")
    old = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(_lines(before or ""), _lines(after), old, f"b/{path}", n=3)
    return "".join([*head, *(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines)]).encode()


def _lines(text: str) -> list[str]:
    """Lines as git splits them: only a newline ends a line."""
    lines = [line + "\n" for line in text.split("\n")]
    return [*lines[:-1], *filter(None, [lines[-1][:-1]])]


def _blob(text: str | None) -> str:
    if text is None:
        return "0" * 40
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
