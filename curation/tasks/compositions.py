"""Chains of operations that each split may use.

Chains of trained operations are split by their first two operations and their length: three quarters of those pairs
serve training, demonstrations and gate, the others held_out. So no training chain begins like a held-out chain.
`unseen` has one withheld operation.
"""

from __future__ import annotations

from itertools import product
from random import Random

from contracts.tasks import Split
from curation.tasks.cases import Chain
from curation.tasks.operations import Operation, Place, places, trained, withheld

LENGTHS = (2, 3)
HELD_OUT_SHARE = 0.25
Family = tuple[Place, Operation]
"""Place of the wrong line, and its correct operation."""


def family_name(family: Family) -> str:
    """Name of a family in reports, e.g. outer-times."""
    return f"{family[0]}-{family[1].name}"


def families_of(split: Split) -> tuple[Family, ...]:
    """Families of a split, in order."""
    operations = withheld if split is Split.UNSEEN else trained
    every: tuple[Place, ...] = places(max(LENGTHS))
    return tuple((place, each) for place in every for each in operations(place))


def deal_chains(seed: int) -> dict[Split, tuple[Chain, ...]]:
    """Chains of every split, by the suite's seed."""
    seen: list[Chain] = []
    held_out: list[Chain] = []
    for length in LENGTHS:
        chosen = _held_out_pairs(length, seed)
        for chain in product(*(trained(place) for place in places(length))):
            (held_out if chain[:2] in chosen else seen).append(chain)
    return {
        Split.TRAIN: tuple(seen),
        Split.GATE: tuple(seen),
        Split.HELD_OUT: tuple(held_out),
        Split.UNSEEN: tuple(chain for length in LENGTHS for chain in _with_one_withheld(length)),
    }


def _held_out_pairs(length: int, seed: int) -> set[Chain]:
    """Share of the pairs of first two operations for held_out, such that both sides have pairs of every operation in
    each of its places.
    """
    first, second = (trained(place) for place in places(length)[:2])
    rng = Random(f"compositions/{seed}/{length}")
    pairs = list(product(first, second))
    while True:
        rng.shuffle(pairs)
        cut = int(HELD_OUT_SHARE * len(pairs))
        if all(_covers(part, first, second) for part in (pairs[:cut], pairs[cut:])):
            return set(pairs[:cut])


def _covers(
    pairs: list[tuple[Operation, Operation]], first: tuple[Operation, ...], second: tuple[Operation, ...]
) -> bool:
    return {a for a, _ in pairs} == set(first) and {b for _, b in pairs} == set(second)


def _with_one_withheld(length: int) -> list[Chain]:
    wanted = places(length)
    return [
        chain
        for index in range(length)
        for chain in product(*((withheld if at == index else trained)(place) for at, place in enumerate(wanted)))
    ]
