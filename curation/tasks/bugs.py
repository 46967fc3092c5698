"""One bug: a module whose single function returns the wrong expression, and every text that belongs to it."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from random import Random

from contracts.digests import digest_of
from curation.tasks.families import FAMILIES, Family, others
from curation.tasks.names import NamePool

PATHS = ("app.py", "calc.py", "core.py", "main.py", "tool.py", "util.py")
VISIBLE_TEST = "tests/test_visible.py"
_NO_NEWLINE = "\n\\ No newline at end of file\n"
_FILLERS = ("# small helpers", "# see the tests", "LIMIT = 9", "UNIT = 1", "import math")


@dataclass(frozen=True)
class Bug:
    """A module with one wrong line."""

    family: Family
    """What the function should return."""
    wrong: Family
    """What it does return."""
    function: str
    arguments: tuple[str, str]
    path: str
    fillers: tuple[str, ...]
    """Lines above the function, which move the wrong line."""

    @property
    def identity(self) -> str:
        """Digest of all choices: two bugs are the same if and only if this is."""
        names = [self.family.name, self.wrong.name, self.function, *self.arguments, self.path, *self.fillers]
        return digest_of(names)

    @property
    def task_id(self) -> str:
        """A name that people can read."""
        return f"{self.family.name}-{self.identity[:12]}"

    @property
    def line(self) -> int:
        """Number of the wrong line, from 1."""
        return len(self.fillers) + 2

    @property
    def instruction(self) -> str:
        """What the agent is told."""
        a, b = self.arguments
        return f"fix {self.path}: {self.function} returns {self.family.phrase.format(a=a, b=b)}"

    def answer(self, family: Family) -> str:
        """The line that returns `family`'s expression of this bug's arguments."""
        return answer_line(family, self.arguments)

    def module(self, family: Family) -> str:
        """The module's text, with `family`'s answer."""
        a, b = self.arguments
        return "\n".join([*self.fillers, f"def {self.function}({a}, {b}):", self.answer(family)]) + "\n"


def answer_line(family: Family, arguments: tuple[str, str]) -> str:
    """The line that returns `family`'s expression of two names."""
    a, b = arguments
    return f"    return {family.expression.format(a=a, b=b)}"


def draw_bug(family: Family, pool: NamePool, rng: Random) -> Bug:
    """A random bug of this family with names from `pool`."""
    wrong = rng.choice(others(family))
    pair = rng.choice(pool.pairs)
    function = rng.choice(pool.functions)
    while function in pair:
        function = rng.choice(pool.functions)
    arguments = pair if rng.random() < 0.5 else (pair[1], pair[0])
    fillers = tuple(rng.sample(_FILLERS, rng.randrange(3)))
    return Bug(family, wrong, function, arguments, rng.choice(PATHS), fillers)


def draw_bugs(count: int, pool: NamePool, rng: Random, seen: set[str]) -> list[Bug]:
    """`count` bugs whose identities are not in `seen`, which grows by them; families take turns."""
    bugs: list[Bug] = []
    while len(bugs) < count:
        bug = draw_bug(FAMILIES[len(bugs) % len(FAMILIES)], pool, rng)
        if bug.identity not in seen:
            seen.add(bug.identity)
            bugs.append(bug)
    return bugs


def file_diff(path: str, before: str | None, after: str) -> bytes:
    """A patch of one text file as `git diff --full-index` writes it, without section headings. before: None for a new file."""
    head = [f"diff --git a/{path} b/{path}\n", "new file mode 100644\n" if before is None else ""]
    head.append(f"index {_blob(before)}..{_blob(after)}{'' if before is None else ' 100644'}\n")
    old = "/dev/null" if before is None else f"a/{path}"
    lines = difflib.unified_diff(_lines(before or ""), _lines(after), old, f"b/{path}", n=3)
    return "".join([*head, *(line if line.endswith("\n") else line + _NO_NEWLINE for line in lines)]).encode()


def _lines(text: str) -> list[str]:
    """Lines as git counts them: only a newline ends one."""
    lines = [line + "\n" for line in text.split("\n")]
    return [*lines[:-1], *filter(None, [lines[-1][:-1]])]


def _blob(text: str | None) -> str:
    if text is None:
        return "0" * 40
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
