"""Forged final states are not solved, are graded, and leave a finding; honest ones leave none."""

from __future__ import annotations

import pytest

from tests.redteam.attacks_files import NoCompilerError
from tests.redteam.catalogue import ALL, FAILURES, FAMILIES, Case, cases
from tests.redteam.forgery import Forgery
from tests.redteam.grading import Graded, Grader, State
from tests.redteam.handmade import handmade
from tests.redteam.honest import RIGHT, WRONG, Honest, HonestCase, honest_cases
from tests.redteam.packages import PACKAGES
from tests.redteam.worlds import World, quickstart

_QUICK = quickstart(14)
_LOCAL = [*handmade(), *_QUICK]
_EACH = 5
"""Tasks at which each honest style is graded, beside one package."""
_FORGED = [*cases(_QUICK, 1), *cases(handmade(), 1)]
_HONEST = honest_cases(_LOCAL, _EACH)
_SAMPLE = 16
"""Of so many states one is graded in every run of the suite."""
_PACKAGED = [
    (forgery, index)
    for index, forgery in enumerate(ALL)
    if any(forgery.needs <= set(each.kinds.split()) for each in PACKAGES)
]


def graded(grader: Grader, state: State) -> Graded:
    try:
        return grader.grade(state)
    except NoCompilerError as error:
        pytest.skip(str(error))


def assert_caught(found: Graded) -> None:
    assert found.verdict is not None, found.fault
    assert not found.verdict.solved, "solved"
    assert found.findings, f"no finding; {found.verdict}"


def assert_clean(found: Graded, solved: bool) -> None:
    assert found.verdict is not None, found.fault
    assert found.verdict.solved == solved, found.verdict
    assert found.verdict.findings == ()


@pytest.mark.parametrize("case", _FORGED[::_SAMPLE], ids=lambda case: case.name)
def test_a_sample_of_forged_states_is_caught(grader: Grader, case: Case) -> None:
    assert_caught(graded(grader, case))


@pytest.mark.parametrize("case", _HONEST[::_SAMPLE], ids=lambda case: case.name)
def test_a_sample_of_honest_states_is_clean(grader: Grader, case: HonestCase) -> None:
    assert_clean(graded(grader, case), case.honest.solved)


@pytest.mark.parametrize("forgery", FAILURES, ids=lambda forgery: forgery.name)
def test_a_state_that_breaks_is_graded_and_not_solved(grader: Grader, forgery: Forgery) -> None:
    found = graded(grader, Case(forgery, _QUICK[0]))
    assert found.verdict is not None and not found.verdict.solved, found.fault


@pytest.mark.redteam
@pytest.mark.parametrize("case", _FORGED, ids=lambda case: case.name)
def test_forged_states_are_caught(grader: Grader, case: Case) -> None:
    assert_caught(graded(grader, case))


@pytest.mark.redteam
@pytest.mark.parametrize(("forgery", "index"), _PACKAGED, ids=lambda each: getattr(each, "name", ""))
def test_forged_states_of_packages_are_caught(
    grader: Grader, packages: dict[str, World], forgery: Forgery, index: int
) -> None:
    fit = [world for world in packages.values() if forgery.suits(world)]
    assert_caught(graded(grader, Case(forgery, fit[index % len(fit)])))


@pytest.mark.redteam
@pytest.mark.parametrize("case", _HONEST, ids=lambda case: case.name)
def test_honest_states_are_clean(grader: Grader, case: HonestCase) -> None:
    assert_clean(graded(grader, case), case.honest.solved)


@pytest.mark.redteam
@pytest.mark.parametrize("honest", (*RIGHT, *WRONG), ids=lambda honest: honest.name)
def test_honest_states_of_packages_are_clean(grader: Grader, packages: dict[str, World], honest: Honest) -> None:
    worlds = list(packages.values())
    assert_clean(graded(grader, HonestCase(honest, worlds[len(honest.name) % len(worlds)])), honest.solved)


def test_there_are_enough_states_of_every_family_with_names_of_their_own() -> None:
    assert len({forgery.name for forgery in (*ALL, *FAILURES)}) == len(ALL) + len(FAILURES)
    assert len(ALL) >= 150 and all(len(found) >= 5 for found in FAMILIES.values())
    assert len({case.name for case in _FORGED}) == len(_FORGED)
    assert sum(case.honest.solved for case in _HONEST) + len(RIGHT) >= 500


def test_every_kind_of_test_is_attacked_and_written_for_honestly() -> None:
    forged, honest = ({case.world.name for case in found} for found in (_FORGED, _HONEST))
    assert forged == honest == {world.name for world in _LOCAL}
