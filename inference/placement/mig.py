"""MIG slices of a GPU: eight memory slices in a row, and seven processor slices.

Source: NVIDIA, Multi-Instance GPU User Guide, "Supported MIG Profiles"; `nvidia-smi mig -lgipp` prints the positions of
a GPU. A100, H100, H200 and B200 have the same geometry:

    position      0   1   2   3   4   5   6   7
    1g            x   x   x   x   x   x   x          1 position each; double: 2 positions, from 0, 2, 4, 6
    2g            x x     x x     x x                2 positions
    3g            x x x x         x x x x            4 positions
    4g            x x x x                            4 positions
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

POSITIONS = 8
PROCESSORS = 7
SLICE_SHARE = 0.9
"""Lower bound of a slice's memory, as a fraction of its nominal share: 1g of an H200 has 16.0 of 17.5 GiB."""


@dataclass(frozen=True)
class Profile:
    """A size of slice."""

    name: str
    processors: int
    """Of `PROCESSORS`."""
    positions: int
    """Memory slices that it takes, of `POSITIONS`."""
    starts: tuple[int, ...]
    """Where it may begin."""
    memory_gib: float | None = None
    """Of a slice; None: a share of the GPU's."""


@dataclass(frozen=True)
class Kind:
    """A model of GPU."""

    memory_gib: float
    profiles: tuple[Profile, ...] = ()
    """MIG profiles, without the variants with media engines (`+me`); empty if the GPU can't be divided."""

    def slice_bytes(self, profile: Profile) -> int:
        """Memory of a slice in bytes; a lower bound if the profile does not tell."""
        share = self.memory_gib * profile.positions / POSITIONS * SLICE_SHARE
        return int((share if profile.memory_gib is None else profile.memory_gib) * 2**30)


def _kind(memory_gib: float, one: int, two: int, four: int) -> Kind:
    """one, two, four: gigabytes in the names of profiles with that many positions."""
    profiles = (
        Profile(f"1g.{one}gb", 1, 1, tuple(range(PROCESSORS))),
        Profile(f"1g.{two}gb", 1, 2, (0, 2, 4, 6)),
        Profile(f"2g.{two}gb", 2, 2, (0, 2, 4)),
        Profile(f"3g.{four}gb", 3, 4, (0, 4)),
        Profile(f"4g.{four}gb", 4, 4, (0,)),
    )
    return Kind(memory_gib, profiles)


KINDS: Mapping[str, Kind] = {
    "A100-40GB": _kind(39.5, 5, 10, 20),
    "A100-80GB": _kind(79.2, 10, 20, 40),
    "H100-80GB": _kind(79.2, 10, 20, 40),
    "H100-94GB": _kind(93.1, 12, 24, 47),
    "H200-141GB": _kind(139.8, 18, 35, 71),
    "B200-180GB": _kind(178.0, 23, 45, 90),
}
"""GPUs by the names of fleet files."""
Layout = tuple[tuple[Profile, int], ...]
"""(profile, start) of each slice, by start."""


@functools.cache
def layouts(kind: Kind) -> tuple[Layout, ...]:
    """Ways to divide a GPU to which no slice can be added and none of which holds all slices of another one."""
    found: dict[tuple[str, ...], Layout] = {}
    for layout in _all_layouts(kind.profiles, 0):
        found.setdefault(tuple(sorted(profile.name for profile, _ in layout)), layout)
    return tuple(layout for names, layout in found.items() if not any(_holds(other, names) for other in found))


def _all_layouts(profiles: tuple[Profile, ...], position: int) -> Iterator[Layout]:
    if position >= POSITIONS:
        yield ()
        return
    yield from _all_layouts(profiles, position + 1)
    for profile in profiles:
        if position in profile.starts:
            for rest in _all_layouts(profiles, position + profile.positions):
                yield ((profile, position), *rest)


def _holds(many: tuple[str, ...], few: tuple[str, ...]) -> bool:
    """Whether `many` has every slice of `few`, and more."""
    return len(many) > len(few) and all(many.count(name) >= few.count(name) for name in few)
