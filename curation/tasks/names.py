"""The 256 names that tasks are written with, and which of them each split may use.

Names are pronounceable, four letters, and one token each (see curation.tokenizer). Splits share no function name and no
unordered pair of argument names. Single argument names are shared: a name that training never showed can't be copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from random import Random

from contracts.tasks import Split

_FIRST = ("ba", "de", "fi", "go", "ka", "le", "mi", "nu", "pa", "ro", "sa", "te", "vi", "wo", "xu", "zi")
_SECOND = ("bo", "da", "fe", "gu", "ki", "la", "mo", "ni", "pu", "ra", "se", "to", "vu", "wa", "xi", "zo")
NAMES = tuple(first + second for first in _FIRST for second in _SECOND)
_SHARES = {Split.TRAIN: (160, 0.8), Split.GATE: (32, 0.1), Split.HELD_OUT: (64, 0.1)}
"""Function names of a split, and its share of the argument pairs."""


@dataclass(frozen=True)
class NamePool:
    """What one split draws from."""

    functions: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    """Unordered; whoever draws one also draws its order."""


def name_pools(seed: int) -> dict[Split, NamePool]:
    """Deal all names and pairs to the splits, by seed."""
    rng = Random(f"names/{seed}")
    functions = list(NAMES)
    pairs = list(combinations(NAMES, 2))
    rng.shuffle(functions)
    rng.shuffle(pairs)
    pools = {}
    for split, (count, share) in _SHARES.items():
        size = int(share * len(NAMES) * (len(NAMES) - 1) / 2)
        pools[split] = NamePool(tuple(functions[:count]), tuple(pairs[:size]))
        del functions[:count], pairs[:size]
    return pools
