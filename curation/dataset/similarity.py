"""Near-duplicate episodes, by the Jaccard index of their sets of token n-grams (shingles).

    tokens -> 64-bit hashes of n-grams -> the 512 smallest -> share of common ones

The smallest hashes of a set are a random sample of it, and those of a union follow from those of its parts: A. Broder,
"On the resemblance and containment of documents" (1997), section 3.1. So an episode takes 4 KiB, however long it is.
Sets of fewer than 512 n-grams are compared exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SKETCH = 512
"""Hashes kept of each episode. The standard error of an index J is at most sqrt(J (1 - J) / SKETCH), so 0.0221."""

_GOLDEN, _FIRST, _SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def sketch(tokens: np.ndarray, ngram: int, others: np.ndarray | None = None) -> np.ndarray:
    """Smallest hashes of the n-grams of an episode, uint64 [at most SKETCH], sorted and distinct.

    tokens: sampled ones of one sequence, int32 [tokens]; fewer than `ngram` are one n-gram. others: sketch of the
    episode's other sequences.
    """
    found = _hashes(tokens, min(ngram, len(tokens))) if len(tokens) else np.empty(0, np.uint64)
    return (np.unique(found) if others is None else np.union1d(found, others))[:SKETCH]


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard index of two episodes, from their sketches, neither of which is empty."""
    merged = np.sort(np.concatenate((first, second)), kind="stable")  # merges the two sorted halves
    twice = merged[1:] == merged[:-1]
    union, common = merged[np.append(True, ~twice)], merged[1:][twice]
    if SKETCH in (len(first), len(second)):
        union = union[:SKETCH]
    return float(np.count_nonzero(common <= union[-1]) / len(union))


def near_duplicates(sketches: Iterable[np.ndarray], threshold: float) -> list[int]:
    """Numbers of the sketches that are similar to an earlier one that is not itself such a number."""
    kept: list[np.ndarray] = []
    found = []
    for number, each in enumerate(sketches):
        if any(similarity(each, other) >= threshold for other in kept):
            found.append(number)
        else:
            kept.append(each)
    return found


def _hashes(tokens: np.ndarray, ngram: int) -> np.ndarray:
    """uint64 [tokens - ngram + 1]: hash of each n-gram; SplitMix64 over its tokens."""
    count = len(tokens) - ngram + 1
    found = np.full(count, ngram, np.uint64)
    for place in range(ngram):
        found = (found ^ tokens[place : place + count].astype(np.uint64)) + _GOLDEN
        found = (found ^ (found >> np.uint64(30))) * _FIRST
        found = (found ^ (found >> np.uint64(27))) * _SECOND
        found ^= found >> np.uint64(31)
    return found
