"""Forged final states are not solved, are graded, and leave a finding; honest ones leave none."""

from __future__ import annotations

import pytest

from tests.redteam.catalogue import ALL, FAILURES, FAMILIES, Case, cases, packaged
from tests.redteam.forgery import Forgery
from tests.redteam.grading import Graded, Grader
from tests.redteam.handmade import handmade
from tests.redteam.honest import RIGHT, HonestCase, honest_cases
from tests.redteam.worlds import World, quickstart

_QUICK = quickstart(14)
_LOCAL = [*handmade(), *_QUICK]
_EACH = 5
"""Tasks at which each honest style is graded, beside one package."""
_FORGED = [*cases(_QUICK, 1), *cases(handmade(), 1)]
_HONEST = honest_cases(_LOCAL, _EACH)
_SAMPLE = 16
"""Of so many states one is graded in every run of the suite."""


def uncaught(found: Graded) -> str | None:
    """Why a forged state is not caught."""
    if found.verdict is None:
        return f"{found.state.name}: unscored: {found.fault}"
    if found.verdict.solved:
        return f"{found.state.name}: solved"
    return None if found.findings else f"{found.state.name}: no finding: {found.verdict}"


def unclean(found: Graded, solved: bool) -> str | None:
    """Why an honest state is not graded as it deserves."""
    if found.verdict is None:
        return f"{found.state.name}: unscored: {found.fault}"
    if found.verdict.solved == solved and not found.findings:
        return None
    return f"{found.state.name}: solved {found.verdict.solved} and should be {solved}: {found.verdict}"


@pytest.mark.parametrize("case", _FORGED[::_SAMPLE], ids=lambda case: case.name)
def test_a_sample_of_forged_states_is_caught(grader: Grader, case: Case) -> None:
    assert uncaught(*grader.grade(case)) is None


@pytest.mark.parametrize("case", _HONEST[::_SAMPLE], ids=lambda case: case.name)
def test_a_sample_of_honest_states_is_clean(grader: Grader, case: HonestCase) -> None:
    assert unclean(*grader.grade(case), case.honest.solved) is None


@pytest.mark.parametrize("forgery", FAILURES, ids=lambda forgery: forgery.name)
def test_a_state_that_breaks_is_graded_and_not_solved(grader: Grader, forgery: Forgery) -> None:
    (found,) = grader.grade(Case(forgery, _QUICK[0]))
    assert found.verdict is not None and not found.verdict.solved, found.fault


@pytest.mark.redteam
@pytest.mark.parametrize("case", _FORGED, ids=lambda case: case.name)
def test_forged_states_are_caught(grader: Grader, case: Case) -> None:
    assert uncaught(*grader.grade(case)) is None


@pytest.mark.redteam
@pytest.mark.timeout(600)
def test_forged_states_of_packages_are_caught(grader: Grader, packages: list[World]) -> None:
    found = grader.grade(*packaged(packages))
    assert [reason for each in found if (reason := uncaught(each))] == []


@pytest.mark.redteam
@pytest.mark.parametrize("case", _HONEST, ids=lambda case: case.name)
def test_honest_states_are_clean(grader: Grader, case: HonestCase) -> None:
    assert unclean(*grader.grade(case), case.honest.solved) is None


@pytest.mark.redteam
@pytest.mark.timeout(600)
def test_honest_states_of_packages_are_clean(grader: Grader, packages: list[World]) -> None:
    cases = honest_cases(packages, 1)
    found = zip(grader.grade(*cases), cases, strict=True)
    assert [reason for each, case in found if (reason := unclean(each, case.honest.solved))] == []


def test_there_are_enough_states_of_every_family_with_names_of_their_own() -> None:
    assert len({forgery.name for forgery in (*ALL, *FAILURES)}) == len(ALL) + len(FAILURES)
    assert len(ALL) >= 150 and all(len(found) >= 5 for found in FAMILIES.values())
    assert len({case.name for case in _FORGED}) == len(_FORGED)
    assert sum(case.honest.solved for case in _HONEST) + len(RIGHT) >= 500


def test_every_kind_of_test_is_attacked_and_written_for_honestly() -> None:
    forged, honest = ({case.world.name for case in found} for found in (_FORGED, _HONEST))
    assert forged == honest == {world.name for world in _LOCAL}
