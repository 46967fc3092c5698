"""pass@1 greedy and sampled, maj@k and pass@k from episodes and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.measures import MEASURES, Sample, any_solved, majority, measure_names, measures, read_samples


def samples(text: str) -> list[Sample]:
    """One sample a letter: its state; capital letters are solved."""
    return [Sample(letter.lower(), letter.isupper()) for letter in text]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("aaB", 0.0), ("AAb", 1.0), ("aaBBc", 0.5), ("aBc", 1 / 3), ("AAbbCC", 2 / 3), ("a", 0.0), ("A", 1.0)],
)
def test_the_majority_is_the_most_frequent_states_verdict_and_ties_share(text: str, expected: float) -> None:
    assert majority(samples(text)) == pytest.approx(expected)


@given(st.lists(st.sampled_from("aBcD"), min_size=1, max_size=8))
def test_the_majority_equals_a_random_choice_between_tied_states_on_average(letters: list[str]) -> None:
    own = samples("".join(letters))
    states = [sample.state for sample in own]
    most = max(map(states.count, states))
    tied = sorted({state for state in states if states.count(state) == most})
    chosen = [next(sample.solved for sample in own if sample.state == state) for state in tied]
    assert majority(own) == pytest.approx(sum(chosen) / len(chosen))
    assert any_solved(own) == float(any(sample.solved for sample in own))


def test_the_four_measures_of_two_tasks() -> None:
    sampled = {"one": samples("aaB"), "two": samples("CCd")}
    found = measures(sampled, {"one": samples("a"), "two": samples("C")}, 1.0)
    assert (found["k"], found["temperature"]) == (3, 1.0)
    assert {name: found[name]["rate"] for name in MEASURES} == {
        "greedy": 0.5,
        "sampled": pytest.approx(0.5),
        "majority": 0.5,
        "any": 1.0,
    }
    assert all(0 <= found[name]["low"] <= found[name]["rate"] <= found[name]["high"] <= 1 for name in MEASURES)
    assert measure_names(3, 0.7) == ("greedy", "T=0.7", "maj@3", "pass@3")


def test_a_task_weighs_the_same_however_many_of_its_samples_were_graded() -> None:
    found = measures({"one": samples("A"), "two": samples("bbbbbbb"), "lost": []}, {}, 1.0)
    assert found["sampled"]["rate"] == pytest.approx(0.5)
    assert (found["sampled"]["tasks"], found["greedy"]["tasks"]) == (2, 0)
    assert found["greedy"]["rate"] is None


def table(rows: Sequence[tuple[str, str, bytes]]) -> pa.Table:
    return pa.table(dict(zip(("episode_id", "task_id", "final_diff"), map(list, zip(*rows, strict=True)), strict=True)))


def test_samples_are_read_by_task_and_ungraded_ones_left_out() -> None:
    rows = [(f"e{index}", task, diff) for index, (task, diff) in enumerate(product("xy", (b"one", b"two", b"one")))]
    rewards = pa.table(
        {"episode_id": [f"e{index}" for index in range(6)], "solved": [True, False, True, None, False, None]}
    )
    found = read_samples(table(rows), rewards)
    assert [sample.solved for sample in found["x"]] == [True, False, True]
    assert found["x"][0].state == found["x"][2].state != found["x"][1].state
    assert [sample.solved for sample in found["y"]] == [False]
    assert majority(found["x"]) == 1.0
