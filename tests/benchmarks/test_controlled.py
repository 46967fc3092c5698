"""Runs beside their controls: when an algorithm is said to work, and the picture of it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.algorithms import KINDS, AlgorithmsOptions, _panels, metrics, row
from benchmarks.controlled import COMPARED, Pair, difference, works
from benchmarks.curves import SplitCurve
from benchmarks.panels import draw_panels

TASKS = 40


def solved(rate: float, tasks: int = TASKS) -> dict[str, list[int]]:
    """8 samples a task, of which the same share is solved everywhere."""
    hits = round(8 * rate)
    return {str(task): [1] * hits + [0] * (8 - hits) for task in range(tasks)}


def curve(base: float, last: float) -> SplitCurve:
    return SplitCurve(dict.fromkeys(COMPARED, base), (dict.fromkeys(COMPARED, last),))


def pair(base: float, run: float, control: float) -> Pair:
    return Pair(curve(base, run), curve(base, control), dict.fromkeys(COMPARED, (solved(run), solved(control))))


def test_an_algorithm_works_when_every_seed_ends_far_above_its_control() -> None:
    pairs = [pair(0.25, 0.75, 0.25), pair(0.25, 0.625, 0.25), pair(0.25, 0.75, 0.125)]
    assert works(pairs, "sampled")
    assert row("grpo", pairs)["works"] == "yes"
    assert metrics({"grpo": pairs})["not_working"] == 0


def test_an_algorithm_that_gains_as_much_as_its_control_does_not_work() -> None:
    pairs = [pair(0.25, 0.75, 0.75), pair(0.25, 0.75, 0.625), pair(0.25, 0.625, 0.75)]
    assert not works(pairs, "sampled")
    assert row("grpo", pairs)["works"] == "NO"
    assert metrics({"grpo": pairs, "ppo": [pair(0.25, 0.75, 0.25)] * 3})["not_working"] == 1


def test_an_algorithm_that_only_falls_less_than_its_control_does_not_work() -> None:
    assert not works([pair(0.5, 0.375, 0.0)] * 3, "sampled")


def test_seeds_that_disagree_are_no_proof_although_their_tasks_agree() -> None:
    differing = [pair(0.25, 0.75, 0.25), pair(0.25, 0.25, 0.25), pair(0.25, 0.375, 0.25)]
    assert works(differing[:1], "sampled"), "one seed alone knows the spread of its tasks only"
    assert not works(differing, "sampled")


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=5))
def test_a_difference_is_the_mean_over_seeds_inside_its_interval(hits: Sequence[tuple[int, int]]) -> None:
    pairs = [{"sampled": (solved(run / 8), solved(control / 8))} for run, control in hits]
    found = difference(pairs, "sampled")
    assert found.mean == pytest.approx(100 * fmean((run - control) / 8 for run, control in hits))
    assert found.low < found.mean < found.high


def test_the_picture_has_a_line_for_each_run_and_control_of_each_measure() -> None:
    pairs = [pair(0.25, 0.75, 0.25)] * 2
    picture = ElementTree.fromstring(draw_panels({"grpo": _panels(pairs), "ppo": _panels(pairs)}))
    lines = [each for each in picture.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2 * 2 * 2 * 2
    assert {"grpo", "ppo", "greedy", "temperature 1"} <= {each.text for each in picture.iter()}


def test_every_algorithm_of_the_trainer_runs_by_default_and_unknown_ones_are_refused() -> None:
    assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"} == set(KINDS)
    assert AlgorithmsOptions().algorithms.split() == list(KINDS)
    with pytest.raises(ValidationError, match="not dpo"):
        AlgorithmsOptions(algorithms="grpo dpo")
