"""The benchmark of slow episodes, small: its ledger finds every token, and only the slow way waits for the longest."""

from __future__ import annotations

import pytest
from scipy.stats import ks_2samp

from benchmarks.stragglers import StragglersOptions, count_missing, run
from contracts.episodes import Episode, Outcome

LENGTHS = {(f"g{group}", sample): 100 if group < 15 and not sample else 5 for group in range(96) for sample in range(8)}
"""768 episodes, 15 of them long."""


def played(turns: dict[tuple[str, int], int], outcome: Outcome = Outcome.COMPLETED) -> list[Episode]:
    return [
        Episode("e", group, "t", "", "", sample, 0, 0, "v", 1.0, 64, outcome, length, [], 0, b"", [])
        for (group, sample), length in turns.items()
    ]


def test_missing_and_shortened_stragglers_count_though_lengths_look_alike() -> None:
    long = {slot: length for slot, length in LENGTHS.items() if length == 100}
    short = {slot: length for slot, length in LENGTHS.items() if length == 5}
    assert ks_2samp(list(short.values()), list(LENGTHS.values())).pvalue > 0.99
    assert count_missing(LENGTHS, played(LENGTHS)) == 0
    assert count_missing(LENGTHS, played(short)) == 15
    assert count_missing(LENGTHS, played(short | dict.fromkeys(long, 50))) == 15
    assert count_missing(LENGTHS, [*played(short), *played(dict.fromkeys(long, 50), Outcome.UNFINISHED)]) == 0


@pytest.mark.slow
def test_every_token_trains_is_carried_on_or_counts_as_lost() -> None:
    options = StragglersOptions(iterations=2, groups=4, group_size=2, carry_over=2, oversample=1, turn_ms=4, repeats=1)
    found = run(options)
    rows = {row["way"]: row for row in found.rows}
    for way in ("all", "carry over"):
        assert rows[way]["tokens"] == rows[way]["trained"] + rows[way]["carried"], way
    assert rows["all"]["carried"] == rows["all"]["lost"] == found.metrics["lost_percent"] == 0
    assert rows["all"]["missing"] == rows["carry over"]["missing"] == found.metrics["episodes_missing"] == 0
    assert rows["first"]["lost"] > 0 < rows["first"]["missing"], "the slowest are dropped"
    assert rows["first"]["episodes"] == rows["all"]["episodes"] == 16 <= rows["carry over"]["episodes"]
    assert 0 < found.metrics["lengths_p_value"] <= 1 and found.metrics["time_over_all"] > 0
