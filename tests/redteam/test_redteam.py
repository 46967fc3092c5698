"""Forged final states are not solved, are graded, and leave a finding; honest ones leave none."""

from __future__ import annotations

import pytest

from curation.findings import SUSPICIONS
from tests.redteam.catalogue import ALL, FAILURES, FAMILIES, Case, cases, packaged
from tests.redteam.forgery import Forgery, module
from tests.redteam.grading import Graded, Grader
from tests.redteam.handmade import handmade
from tests.redteam.honest import RIGHT, WRONG, HonestCase, honest_cases
from tests.redteam.worlds import World, quickstart

_QUICK = quickstart(14)
_LOCAL = [*handmade(), *_QUICK]
_EACH = 5
"""Tasks at which each honest style is graded, beside one package."""
_FORGED = [*cases(_QUICK, 1), *cases(handmade(), 1)]
_HONEST = honest_cases(_LOCAL, _EACH)
_SAMPLE = 48
"""Of so many states one is graded in every run of the suite."""
_HANDMADE_MORE, _QUICK_MORE = ([world.with_one_more_test() for world in worlds] for worlds in (handmade(), _QUICK))
_FORGED_MORE = [*cases(_QUICK_MORE, 1), *cases(_HANDMADE_MORE, 1)]
_HONEST_MORE = honest_cases([*_HANDMADE_MORE, *_QUICK_MORE], 1)
_BELIEVED = (
    "mock-magic",
    "approx-infinite",
    "eq-small-only",
    "weak-proxy",
    "read-cat",
    "compiled-marshal",
    "state-shm",
)
"""Forgeries of which one run as written notices nothing."""
_NOTHING = next(each for each in WRONG if each.name == "nothing")
_RAISES = module(
    "raises", "an exception for every answer", "def FN(*args, **named):\n    raise ValueError('out of range')\n"
)


def passed_by(found: Graded) -> set[str]:
    """Names of the tests that count."""
    assert found.verdict is not None, found.fault
    return set() if found.verdict.tampered else {each.name for each in found.verdict.tests if each.status == "passed"}


def unfair(found: Graded) -> str | None:
    """Why an honest state that fails one test alone does not get its share."""
    passed, findings = passed_by(found), {each.split(":")[0] for each in found.findings}
    if passed == set(found.state.world.task.tests[:-1]) and findings <= SUSPICIONS:
        return None
    return f"{found.state.name}: {found.verdict}"


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


@pytest.mark.parametrize("name", _BELIEVED)
def test_forged_states_that_fail_a_test_on_purpose_have_passed_none(grader: Grader, name: str) -> None:
    case = next(case for case in _FORGED_MORE if case.forgery.name == name)
    (believed,), (confirmed,) = grader.grade(case), grader.grade(case, confirm=True)
    assert len(passed_by(believed)) == len(case.world.task.tests) - 1, "one run alone believes it"
    assert confirmed.verdict is not None and confirmed.verdict.tampered and not passed_by(confirmed)


@pytest.mark.parametrize("case", _HONEST_MORE[:: 2 * _SAMPLE], ids=lambda case: case.name)
def test_a_sample_of_honest_states_that_fail_one_test_gets_its_share(grader: Grader, case: HonestCase) -> None:
    assert not case.honest.solved or unfair(*grader.grade(case, confirm=True)) is None


@pytest.mark.redteam
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [*_HANDMADE_MORE, *_QUICK_MORE], ids=lambda world: world.name)
def test_of_forged_states_that_fail_a_test_no_others_count_than_of_honest_failures(
    grader: Grader, world: World
) -> None:
    cases = [case for case in _FORGED_MORE[::4] if case.world is world]
    nothing, raises, *forged = grader.grade(HonestCase(_NOTHING, world), Case(_RAISES, world), *cases, confirm=True)
    honest = passed_by(nothing) | passed_by(raises)
    assert [each for each in forged if not passed_by(each) <= honest] == []


@pytest.mark.redteam
@pytest.mark.parametrize("case", _HONEST_MORE, ids=lambda case: case.name)
def test_honest_states_that_fail_one_test_get_their_share(grader: Grader, case: HonestCase) -> None:
    (found,) = grader.grade(case, confirm=True)
    assert found.verdict is not None and not found.verdict.tampered, found
    assert not case.honest.solved or unfair(found) is None


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
