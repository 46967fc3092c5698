"""What the learning and overhead benchmarks compute from what they read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import Curve, SplitCurve
from benchmarks.spans import union_seconds

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def scores(greedy: float, majority: float = 0.2) -> dict[str, float]:
    return {"greedy": greedy, "sampled": greedy / 2, "majority": majority, "any": 0.9}


def curve(base: float, *live: float, majority: float = 0.2) -> Curve:
    split = SplitCurve(scores(base, majority), tuple(scores(each) for each in live))
    return Curve("e", split, split, base_seconds=100.0, seconds=tuple(10.0 for _ in live))


def test_a_curve_knows_when_it_gained_enough_and_how_long_that_took() -> None:
    row = curve(0.1, 0.12, 0.66, 0.6).row(15, 5)
    assert row["iterations to target"] == 2 and row["seconds to target"] == 20
    assert (row["greedy gain"], row["T=1 gain"], row["over base maj"]) == (50.0, 25.0, 40.0)


def test_a_gain_below_the_base_policys_majority_is_not_enough() -> None:
    sharpened = curve(0.1, 0.3, 0.4, majority=0.38)
    assert sharpened.held_out.reached(15, 5) is None
    assert not sharpened.held_out.ends_above(15, 5)
    assert sharpened.row(15, 5)["seconds to target"] == "-"


def test_what_was_reached_and_lost_again_does_not_count_at_the_end() -> None:
    lost = curve(0.1, 0.6, 0.15).held_out
    assert lost.reached(15, 5) == 1
    assert not lost.ends_above(15, 5)


@given(INTERVALS)
def test_the_union_of_intervals_counts_each_instant_once(intervals: list[tuple[int, int]]) -> None:
    instants = {instant for first, last in intervals for instant in range(first, last)}
    assert union_seconds(intervals) == len(instants)
