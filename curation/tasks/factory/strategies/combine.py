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
                if len(parts) < size and each.candidate.function not in {part.candidate.function for part in parts}:
                    parts.append(each)
                    pool.remove(each)
            if len(parts) >= _SIZES[0]:
                parts.sort(key=lambda part: part.candidate.edits[0].start)
                edits = tuple(edit for part in parts for edit in part.candidate.edits)
                meta = {"functions": [part.candidate.function for part in parts]}
                operator = f"combine_{len(parts)}"
                found.append(Candidate("combine", operator, parts[0].candidate.function, edits, meta))
    rng.shuffle(found)
    return found[:most]
