"""The bias of keeping the first to arrive: bounded for certain, and estimated from how long the others had become."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.rollouts.straggler_bias import Played, solve_rates


def raced(rng: random.Random, group_size: int, started: int) -> tuple[list[Played], list[bool]]:
    """One group in which failing takes longer: (as recorded, what every one of the started would have come to)."""
    ran = []
    for _ in range(started):
        solved = rng.random() < 0.5
        ran.append((rng.randint(20, 60) if solved else rng.randint(40, 120), solved))
    ran.sort()
    cut = ran[group_size - 1][0]
    kept = [Played("completed", length, solved) for length, solved in ran[:group_size]]
    late = [Played("aborted", min(cut, length), None) for length, _ in ran[group_size:]]
    return kept + late, [solved for _, solved in ran]


def test_bias_of_dropped_stragglers_is_estimated() -> None:
    rng = random.Random(7)
    played, truth = [], []
    for _ in range(200):
        rows, outcomes = raced(rng, 16, 18)
        played += rows
        truth += outcomes
    rates = solve_rates(played)
    assert rates is not None
    real = fmean(truth)
    assert rates.kept - real > 0.03, "the case is there to be found"
    assert rates.lowest <= real <= rates.highest
    assert abs(rates.estimated - real) < (rates.kept - real) / 3
    assert rates.bias == pytest.approx(rates.kept - rates.estimated)


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans(), st.booleans()), max_size=30))
def test_bounds_contain_every_possible_straggler_result(rows: list[tuple[int, bool, bool]]) -> None:
    played = [
        Played("aborted" if late else "completed", length, None if late else solved) for length, solved, late in rows
    ]
    rates = solve_rates(played)
    if rates is None:
        assert all(late for *_, late in rows) or not any(late for *_, late in rows)
        return
    assert rates.lowest - 1e-12 <= fmean(solved for _, solved, _ in rows) <= rates.highest + 1e-12
    assert rates.lowest - 1e-12 <= rates.estimated <= rates.highest + 1e-12


def test_infra_errors_and_ungraded_episodes_do_not_count() -> None:
    rows = [Played("completed", 5, True), Played("infra_error", 9, None), Played("dropped", 5, None)]
    rates = solve_rates(rows)
    assert rates is not None
    assert (rates.kept, rates.lowest, rates.highest, rates.estimated) == (1.0, 0.5, 1.0, 1.0)
    assert solve_rates(rows[:2]) is None
