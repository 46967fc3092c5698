"""What the learning and overhead benchmarks compute from what they read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.curves import Curve
from benchmarks.spans import union_seconds

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def curve(base: float, *live: float) -> Curve:
    return Curve("e", base, live, base_seconds=100.0, seconds=tuple(10.0 for _ in live))


def test_a_curve_knows_when_it_gained_enough_and_how_long_that_took() -> None:
    row = curve(0.4, 0.45, 0.66, 0.6).row(25)
    assert row["iterations to +25"] == 2 and row["seconds to +25"] == 20
    assert row["best gain"] == 26.0 and row["final gain"] == 20.0


def test_a_curve_that_never_gains_enough_says_so() -> None:
    assert curve(0.4, 0.5, 0.64).reached(25) is None
    assert curve(0.4, 0.5, 0.64).row(25)["seconds to +25"] == "-"


@given(INTERVALS)
def test_the_union_of_intervals_counts_each_instant_once(intervals: list[tuple[int, int]]) -> None:
    instants = {instant for first, last in intervals for instant in range(first, last)}
    assert union_seconds(intervals) == len(instants)
