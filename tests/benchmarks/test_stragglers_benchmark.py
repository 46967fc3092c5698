"""The benchmark of slow episodes, small: its ledger finds every token, and only the slow way waits for the longest."""

from __future__ import annotations

import pytest

from benchmarks.stragglers import StragglersOptions, run


@pytest.mark.slow
def test_every_token_trains_is_carried_on_or_counts_as_lost() -> None:
    options = StragglersOptions(iterations=2, groups=4, group_size=2, carry_over=2, oversample=1, turn_ms=4, repeats=1)
    found = run(options)
    rows = {row["way"]: row for row in found.rows}
    for way in ("all", "carry over"):
        assert rows[way]["tokens"] == rows[way]["trained"] + rows[way]["carried"], way
    assert rows["all"]["carried"] == rows["all"]["lost"] == found.metrics["lost_percent"] == 0
    assert rows["first"]["lost"] > 0, "the slowest are dropped"
    assert rows["first"]["episodes"] == rows["all"]["episodes"] == 16 <= rows["carry over"]["episodes"]
    assert 0 < found.metrics["lengths_p_value"] <= 1 and found.metrics["time_over_all"] > 0
