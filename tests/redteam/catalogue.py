"""Every forgery, by family, and the tasks that each is tried on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import chain

from tests.redteam import (
    attacks_blind,
    attacks_equality,
    attacks_exits,
    attacks_files,
    attacks_judge,
    attacks_later,
    attacks_oracle,
    attacks_reading,
    attacks_state,
)
from tests.redteam.forgery import Forgery
from tests.redteam.worlds import World

FAMILIES = {
    "lying answers": attacks_equality.FORGERIES,
    "expectations read": attacks_reading.FORGERIES,
    "oracles": attacks_oracle.FORGERIES,
    "changed and missing expectations": attacks_blind.FORGERIES,
    "the judge replaced": attacks_judge.FORGERIES,
    "acting later": attacks_later.LATER,
    "reports forged": attacks_later.REPORTS,
    "exits and skips": attacks_exits.FORGERIES,
    "compiled code": attacks_files.COMPILED,
    "shadowing modules": attacks_files.SHADOWS,
    "helpers, configuration and tests": attacks_files.HELPERS,
    "state, time and resources": attacks_state.FORGERIES,
    "odd diffs": attacks_files.DIFFS,
}
ALL: tuple[Forgery, ...] = tuple(
    chain.from_iterable(
        (dataclasses.replace(each, family=family) for each in found) for family, found in FAMILIES.items()
    )
)
_PACKAGED = 3
FAILURES: tuple[Forgery, ...] = (*attacks_exits.FAILURES, *attacks_files.FAILURES)
"""States that break rather than lie: graded and not solved, but no proof of an intent."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One forgery at one task."""

    forgery: Forgery
    world: World

    @property
    def name(self) -> str:
        """Unique, for a test's id."""
        return f"{self.forgery.name}@{self.world.name}"

    def diff(self) -> bytes:
        """The final state."""
        return self.forgery.make(self.world)


def packaged(worlds: Sequence[World]) -> Iterator[Case]:
    """Every third forgery at one of the packages."""
    for index, forgery in enumerate(ALL[::_PACKAGED]):
        fit = [world for world in worlds if forgery.suits(world)]
        if fit:
            yield Case(forgery, fit[index % len(fit)])


def cases(worlds: Sequence[World], each: int) -> Iterator[Case]:
    """Every forgery at `each` tasks that suit it (fewer where fewer do); which these are rotates."""
    for index, forgery in enumerate(ALL):
        fit = [world for world in worlds if forgery.suits(world)]
        for step in range(min(each, len(fit))):
            yield Case(forgery, fit[(index + step) % len(fit)])
