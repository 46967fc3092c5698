import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.statistics import non_inferior, paired_difference, pass_rate, solved_by_task, wilson_interval

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, Z**2 / (10 + Z**2)),  # closed form at 0: z²/(n + z²)
        (10, 10, 10 / (10 + Z**2), 1.0),
        (5, 10, 0.236593, 0.763407),
        (81, 263, 0.255244, 0.366213),  # Newcombe (1998), table I, method 3: 0.2553 to 0.3662
        (15, 148, 0.062386, 0.160525),  # the same table: 0.0624 to 0.1605
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_gives_known_values(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_interval_holds_the_share_and_mirrors(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson_interval(5, 4)


def test_paired_difference_equals_the_hand_computed_interval() -> None:
    # per-task differences 1, 0.5, 0, 0.5: mean 0.5, sample variance (0.25 + 0 + 0.25 + 0) / 3 = 1/6, standard error sqrt(1/24)
    candidate = {"a": [1, 1], "b": [1, 0], "c": [1, 1], "d": [1, 1]}
    parent = {"a": [0, 0], "b": [0, 0], "c": [1, 1], "d": [1, 0]}
    found = paired_difference(candidate, parent)
    half = Z * (1 / 24) ** 0.5
    assert (found.mean, found.low, found.high, found.n) == pytest.approx((0.5, 0.5 - half, 0.5 + half, 4), abs=1e-12)


def test_samples_of_one_task_do_not_narrow_the_interval() -> None:
    one = paired_difference({"a": [1], "b": [0], "c": [1]}, {"a": [0], "b": [0], "c": [0]})
    many = paired_difference({"a": [1] * 50, "b": [0] * 50, "c": [1] * 50}, {"a": [0], "b": [0], "c": [0]})
    assert (one.low, one.high) == (many.low, many.high)


def test_tasks_that_only_one_policy_played_are_left_out() -> None:
    assert paired_difference({"a": [1], "b": [1], "x": [0]}, {"a": [1], "b": [1], "y": [1], "x": []}).n == 2


def test_a_single_task_proves_nothing() -> None:
    assert not non_inferior(paired_difference({"a": [1]}, {"a": [0]}), 0.5).holds


@given(st.dictionaries(st.text(max_size=2), st.lists(st.integers(0, 1), max_size=3), max_size=6), st.floats(0, 1))
def test_a_policy_against_itself_has_no_difference(outcomes: dict[str, list[int]], margin: float) -> None:
    found = paired_difference(outcomes, outcomes)
    assert found.mean == 0
    assert non_inferior(found, margin).holds == (found.n >= 2 and margin > 0)


def test_non_inferiority_asks_the_lower_end_of_the_interval() -> None:
    worse = paired_difference(
        {str(task): [task % 10 != 0] for task in range(100)}, {str(task): [1] for task in range(100)}
    )
    assert worse.mean == pytest.approx(-0.1)
    assert non_inferior(worse, 0.2).holds
    refused = non_inferior(worse, 0.12)
    assert not refused.holds
    assert "-0.100" in refused.sentence and "100 tasks" in refused.sentence and "-0.120" in refused.sentence


def test_ungraded_episodes_count_for_nothing() -> None:
    table = pa.table({"task_id": ["a", "a", "b", "b"], "solved": pa.array([True, None, False, True])})
    found = pass_rate(table)
    assert (found.solved, found.n, found.rate) == (2, 3, pytest.approx(2 / 3))
    assert solved_by_task(table) == {"a": [1], "b": [0, 1]}
    assert pass_rate(table.slice(1, 1)).rate is None
