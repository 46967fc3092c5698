"""Strategy `combine`: two to four proved bugs of one file, graded by one test file, at once in different functions."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from curation.tasks.factory.screen import Screened
from curation.tasks.factory.strategies import Candidate

_SIZES = (2, 3, 4)


def combined(proved: Sequence[Screened], seed: int, most: int) -> list[Candidate]:
    """At most `most` combinations; each bug is in one at most."""
    by_file: dict[tuple[str, str], list[Screened]] = {}
    for each in sorted(proved, key=lambda each: each.candidate.identity):
        by_file.setdefault((each.candidate.path, each.file), []).append(each)
    rng = Random(f"combine/{seed}")
    found: list[Candidate] = []
    for _, pool in sorted(by_file.items()):
        rng.shuffle(pool)
        while len(pool) >= _SIZES[0]:
            size, parts = rng.choice(_SIZES), [pool.pop()]
            for each in list(pool):
                if len(parts) < size and all(_apart(each.candidate, part.candidate) for part in parts):
                    parts.append(each)
                    pool.remove(each)
            if len(parts) >= _SIZES[0]:
                parts.sort(key=lambda part: part.candidate.edits[0].start)
                edits = tuple(edit for part in parts for edit in part.candidate.edits)
                meta = {"functions": [name for part in parts for name in _functions(part.candidate)]}
                operator = f"combine_{len(parts)}"
                found.append(Candidate("combine", operator, parts[0].candidate.function, edits, meta))
    rng.shuffle(found)
    return found[:most]


def _apart(one: Candidate, other: Candidate) -> bool:
    """Whether two bugs of a file share no function, and no edits touch each other."""
    return set(_functions(one)).isdisjoint(_functions(other)) and all(
        left.end < right.start or right.end < left.start for left in one.edits for right in other.edits
    )


def _functions(candidate: Candidate) -> list[str]:
    """Keys of the functions that a bug changes, its own first."""
    helpers = [f"{candidate.path}::{name}" for name in candidate.meta.get("helpers", ())]
    return list(dict.fromkeys([candidate.function, *helpers, *candidate.meta.get("functions", ())]))
