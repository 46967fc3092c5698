"""Choose among bugs: no two of the same kind of edit and effect, and no function, file or operator in excess."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rensa import RMinHash

from contracts.digests import digest_of
from curation.tasks.factory.functions import Function
from curation.tasks.factory.screen import Screened
from curation.tasks.factory.strategies import Candidate, changed_text, normalized

T = TypeVar("T")
SIMILAR = 0.9
"""Jaccard similarity of two edits of a function above which they count as the same."""
SAME_FAILURES = 4
"""Bugs of one function that may fail the same tests."""
_PERMUTATIONS = 64


class Caps:
    """Limits of accepted bugs by function, file and operator."""

    def __init__(self, count: int, functions: int, files: int, operators: int) -> None:
        """count: tasks wanted. functions, files, operators: numbers of those with candidates."""
        self._most = {
            "function": max(4, math.ceil(3 * count / max(1, functions))),
            "file": max(8, math.ceil(count * (0.6 if files > 2 else 1))),
            "operator": max(4, math.ceil(max(0.2, 1.5 / max(1, operators)) * count)),
        }
        self._taken: Counter[tuple[str, str]] = Counter()

    def admits(self, candidate: Candidate) -> str | None:
        """Name of the cap that a candidate exceeds, or None."""
        return next((kind for kind, name in _kinds(candidate) if self._taken[kind, name] >= self._most[kind]), None)

    def take(self, candidate: Candidate) -> None:
        """Count an accepted candidate."""
        self._taken.update(_kinds(candidate))


def _kinds(candidate: Candidate) -> tuple[tuple[str, str], ...]:
    return ("function", candidate.function), ("file", candidate.path), ("operator", candidate.operator)


class Graders:
    """Chooses the test file that grades a bug: the one that fails for the most bugs of the same function, then the one
    with the most failing nodes. A file that only calls the function in passing fails for few of them.
    """

    def __init__(self) -> None:
        self._noticed: Counter[tuple[str, str]] = Counter()

    def choose(self, screened: Sequence[Screened]) -> list[Screened]:
        """Bugs with their files. They and all of earlier calls count."""
        self._noticed.update((each.candidate.function, file) for each in screened for file in each.files)
        return [dataclasses.replace(each, file=self._best(each)) for each in screened]

    def _best(self, screened: Screened) -> str:
        function, files = screened.candidate.function, screened.files
        return max(sorted(files), key=lambda file: (self._noticed[function, file], files[file]))


class Distinct:
    """Drops bugs that are duplicates of each other, or of a bug chosen before."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """functions: by key."""
        self._functions = functions
        self._syntaxes: set[str] = set()
        self._failures: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._prints: dict[str, list[RMinHash]] = defaultdict(list)

    def choose(self, screened: Iterable[Screened]) -> tuple[list[Screened], dict[str, int]]:
        """Bugs without duplicates, and the number left out by reason."""
        kept: list[Screened] = []
        reasons: Counter[str] = Counter()
        for each in sorted(screened, key=lambda each: digest_of(each.candidate.identity)):
            function = self._functions[each.candidate.function]
            syntax = f"{function.key} {normalized(changed_text(function, each.candidate.edits))}"
            print_, known = _print(function, each.candidate), self._prints[function.key]
            if syntax in self._syntaxes:
                reasons["same syntax"] += 1
            elif self._failures[function.key, tuple(sorted(each.failed))] >= SAME_FAILURES:
                reasons["same failing tests"] += 1
            elif any(print_.jaccard(other) > SIMILAR for other in known):
                reasons["similar edit"] += 1
            else:
                self._syntaxes.add(syntax)
                self._failures[function.key, tuple(sorted(each.failed))] += 1
                known.append(print_)
                kept.append(each)
        return kept, dict(sorted(reasons.items()))


def in_turns(items: Sequence[T], *keys: Callable[[T], str]) -> Iterator[T]:
    """Items in an order in which the groups of the first key take turns, and in each group those of the next key."""
    if not keys:
        yield from items
        return
    groups: dict[str, list[T]] = defaultdict(list)
    for each in items:
        groups[keys[0](each)].append(each)
    queues = [list(in_turns(groups[name], *keys[1:])) for name in sorted(groups, key=digest_of)]
    for number in range(max(map(len, queues), default=0)):
        yield from (queue[number] for queue in queues if number < len(queue))


def _print(function: Function, candidate: Candidate) -> RMinHash:
    """MinHash of what an edit replaces, with what, and where."""
    words = []
    for each in candidate.edits:
        old = function.source.data[each.start : each.end].decode() if each.path == function.source.path else ""
        line = function.source.data[: each.start].count(b"\n")
        words += [f"-{word}" for word in old.split()] + [f"+{word}" for word in each.text.split()] + [f"@{line}"]
    print_ = RMinHash(num_perm=_PERMUTATIONS, seed=7)
    print_.update([" ".join(words[start : start + 2]) for start in range(len(words))] or ["nothing"])
    return print_
