"""The 256 names that tasks use, and the split of each.

Names are pronounceable, four letters, and one token each (see curation.tokenizer). Splits share no function name.
Arguments may have any name, since the policy can't copy a name that training never showed.
"""

from __future__ import annotations

from random import Random

from contracts.tasks import Split

_FIRST = ("ba", "de", "fi", "go", "ka", "le", "mi", "nu", "pa", "ro", "sa", "te", "vi", "wo", "xu", "zi")
_SECOND = ("bo", "da", "fe", "gu", "ki", "la", "mo", "ni", "pu", "ra", "se", "to", "vu", "wa", "xi", "zo")
NAMES = tuple(first + second for first in _FIRST for second in _SECOND)
_SHARES = {Split.TRAIN: 160, Split.GATE: 32, Split.HELD_OUT: 40, Split.UNSEEN: 24}
"""Number of function names of each split."""


def function_names(seed: int) -> dict[Split, tuple[str, ...]]:
    """Assign all names to the splits, by seed."""
    names = list(NAMES)
    Random(f"names/{seed}").shuffle(names)
    dealt = {}
    for split, count in _SHARES.items():
        dealt[split] = tuple(names[:count])
        del names[:count]
    return dealt
