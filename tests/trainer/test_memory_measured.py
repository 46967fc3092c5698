"""The forecast of memory against the peaks of real training processes."""

from __future__ import annotations

import pytest

from benchmarks.training_memory import CASES, compare


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "one-layer", "tokens", "tiled-head", "fresh"])
def test_forecast_is_within_five_percent_of_the_measured_peak(name: str) -> None:
    found = compare(CASES[name])
    assert abs(found["difference %"]) < 5, found
    assert found["measured GiB"] > 0.2, "a peak that libraries do not hide"
