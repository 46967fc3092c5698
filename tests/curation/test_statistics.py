from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.power import moved, sample
from curation.statistics import (
    CONFIDENCE,
    difference_errors,
    lower_bounds,
    non_inferior,
    paired_difference,
    pass_rate,
    rate_interval,
    solved_by_task,
    student_quantile,
)

Z = 1.959963984540054
OUTCOMES = st.dictionaries(st.text(max_size=2), st.lists(st.integers(0, 1), max_size=3), max_size=6)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (127, 1.97882)],
)
def test_student_quantiles_equal_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=5e-3 if freedom == 3 else 3e-4)
    assert student_quantile(0.025, freedom) == pytest.approx(-student_quantile(0.975, freedom), abs=1e-9)


@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    [
        (0, 10, 0.0, Z**2 / (10 + Z**2)),  # closed form at 0: z^2 / (n + z^2)
        (10, 10, 10 / (10 + Z**2), 1.0),
        (5, 10, 0.236593, 0.763407),
        (81, 263, 0.255244, 0.366213),  # Newcombe (1998), table I, method 3: 0.2553 to 0.3662
        (15, 148, 0.062386, 0.160525),  # the same table: 0.0624 to 0.1605
    ],
)
def test_with_one_sample_a_task_the_interval_is_wilsons(solved: int, n: int, low: float, high: float) -> None:
    found = rate_interval([1] * solved + [0] * (n - solved), [1] * n)
    assert found == pytest.approx((low, high), abs=5e-5)


@given(st.lists(st.integers(0, 1), min_size=2, max_size=60), st.integers(2, 50))
def test_copies_of_a_tasks_samples_do_not_narrow_the_interval(outcomes: list[int], copies: int) -> None:
    once = rate_interval(outcomes, [1] * len(outcomes))
    many = rate_interval([copies * each for each in outcomes], [copies] * len(outcomes))
    assert many == pytest.approx(once, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), max_size=60))
def test_rate_interval_contains_the_rate_and_is_symmetric(tasks: list[tuple[int, int]]) -> None:
    solved, samples = [min(wins, count) for wins, count in tasks], [count for _, count in tasks]
    low, high = rate_interval(solved, samples)
    failed = [count - wins for wins, count in zip(solved, samples, strict=True)]
    assert 0 <= low <= high <= 1
    if sum(samples):
        assert low - 1e-12 <= sum(solved) / sum(samples) <= high + 1e-12
    assert rate_interval(failed, samples) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_a_perfect_score_counts_tasks_and_not_samples() -> None:
    assert rate_interval([8] * 64, [8] * 64) == rate_interval([1] * 64, [1] * 64)
    low, high = rate_interval([8] * 64, [8] * 64)
    assert high == 1.0 and 0.93 < low < 0.95


def test_fewer_than_two_tasks_give_the_widest_interval() -> None:
    assert rate_interval([3], [4]) == rate_interval([], []) == rate_interval([3, 0], [4, 0]) == (0.0, 1.0)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 <= solved <= samples"):
        rate_interval([5, 1], [4, 4])


def coverage(
    samples: int, mean: float, between: float, loss: float, tasks: int, trials: int = 2000
) -> tuple[float, float]:
    """Share of simulated intervals that hold the true rate, and the true difference."""
    generator = np.random.default_rng(7)
    concentration = 1 / between - 1
    rates = generator.beta(mean * concentration, (1 - mean) * concentration, (trials, tasks))
    parent = sample(generator, rates, samples)
    found = sample(generator, moved(rates, mean, loss), samples) - parent
    half = student_quantile(0.5 + CONFIDENCE / 2, tasks - 1) * difference_errors(found, samples)
    held = [low <= mean <= high for low, high in (rate_interval(row * samples, [samples] * tasks) for row in parent)]
    return float(np.mean(held)), float((np.abs(found.mean(-1) - loss) <= half).mean())


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
@pytest.mark.parametrize(("mean", "between"), [(0.5, 0.05), (0.8, 0.3), (0.8, 0.7)])
def test_intervals_hold_the_true_value_in_93_to_97_percent(samples: int, mean: float, between: float) -> None:
    rate, difference = coverage(samples, mean, between, -0.03, tasks=128)
    assert 0.93 <= rate <= 0.97
    assert 0.93 <= difference <= 0.975


@pytest.mark.parametrize("samples", [1, 2, 4, 8])
@pytest.mark.parametrize("mean", [0.5, 0.8, 0.95])
def test_intervals_of_few_tasks_err_to_the_wide_side(samples: int, mean: float) -> None:
    rate, difference = coverage(samples, mean, 0.3, 0.0, tasks=14)
    assert 0.93 <= rate <= 0.98
    assert difference >= 0.93


def test_paired_difference_equals_the_hand_computed_interval() -> None:
    # per-task differences 1, 0.5, 0, 0.5 of two samples: mean 0.5, squares 0.5 and 1 / 2^2 added, over 4 * 3: standard
    # error 0.25
    candidate = {"a": [1, 1], "b": [1, 0], "c": [1, 1], "d": [1, 1]}
    parent = {"a": [0, 0], "b": [0, 0], "c": [1, 1], "d": [1, 0]}
    found = paired_difference(candidate, parent, gate_confidence=0.9)
    half = student_quantile(0.975, 3) * 0.25
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, max(-1.0, 0.5 - half), 1.0), abs=1e-12)
    assert (found.n, found.bound) == (4, pytest.approx(0.5 - student_quantile(0.95, 3) * 0.25))


def test_copies_of_samples_hardly_narrow_a_difference() -> None:
    def outcomes(copies: int) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
        return {f"t{i}": [i % 2] * copies for i in range(60)}, {f"t{i}": [i % 3 == 0] * copies for i in range(60)}

    one, many = (paired_difference(*outcomes(copies)) for copies in (1, 50))
    assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.03)


def test_the_gates_bound_is_the_one_that_power_is_simulated_with() -> None:
    candidate = {str(task): [task % 3 != 0, task % 5 != 0] for task in range(40)}
    parent = {str(task): [task % 4 != 0, 1] for task in range(40)}
    differences = np.array([np.mean(candidate[task]) - np.mean(parent[task]) for task in sorted(candidate)])
    found = paired_difference(candidate, parent, gate_confidence=0.8)
    assert found.bound == pytest.approx(float(lower_bounds(differences[None], 2, 0.8)[0]), abs=1e-12)


def test_tasks_that_only_one_policy_played_are_left_out() -> None:
    assert paired_difference({"a": [1], "b": [1], "x": [0]}, {"a": [1], "b": [1], "y": [1], "x": []}).n == 2


def test_single_task_is_never_non_inferior() -> None:
    assert not non_inferior(paired_difference({"a": [1]}, {"a": [0]}), 0.5).holds


@given(OUTCOMES, st.floats(0, 1))
def test_difference_of_a_policy_from_itself_is_zero_with_an_interval(
    outcomes: dict[str, list[int]], margin: float
) -> None:
    found = paired_difference(outcomes, outcomes)
    assert found.mean == 0
    assert found.low < 0 < found.high
    assert non_inferior(found, margin).holds == (-found.bound < margin)


def test_equal_policies_pass_a_margin_of_five_points() -> None:
    outcomes = {str(task): [1, 1] for task in range(128)}
    assert non_inferior(paired_difference(outcomes, outcomes, 0.9), 0.05).holds


def test_non_inferiority_uses_the_lower_bound() -> None:
    worse = paired_difference(
        {str(task): [task % 10 != 0] for task in range(100)}, {str(task): [1] for task in range(100)}
    )
    assert worse.mean == pytest.approx(-0.1)
    assert non_inferior(worse, 0.2).holds
    refused = non_inferior(worse, 0.12, "the best policy so far, abc")
    assert not refused.holds
    for part in ("-0.100", "100 tasks", "-0.120", "not shown to be non-inferior to the best policy so far, abc"):
        assert part in refused.sentence


def test_ungraded_episodes_count_for_nothing() -> None:
    table = pa.table({"task_id": ["a", "a", "b", "b"], "solved": pa.array([True, None, False, True])})
    found = pass_rate(table)
    assert (found.solved, found.n, found.rate, found.tasks) == (2, 3, pytest.approx(2 / 3), 2)
    assert solved_by_task(table) == {"a": [1], "b": [0, 1]}
    assert pass_rate(table.slice(1, 1)).rate is None
