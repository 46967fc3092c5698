"""Runs compared with their controls: differences of held-out pass rates with intervals, and whether training works.

Run and control of a seed start from one base policy and are measured on one set of tasks, so the base policy cancels
out and the difference is paired by task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.curves import SplitCurve
from contracts.artifacts import open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store
from contracts.tasks import Split
from curation.statistics import CONFIDENCE, paired_difference, solved_by_task, student_quantile
from resources.refs import read_artifact
from triplane_dagster.cli.history import summaries

Solved = Mapping[str, Sequence[int]]
"""Task id -> 0/1 results of its samples."""
COMPARED = ("greedy", "sampled")
"""Measures that are compared: temperature 0, and the rollouts' temperature."""


@dataclass(frozen=True)
class Difference:
    """Mean difference of pass rates, run minus control, with its interval at CONFIDENCE; in points."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


@dataclass(frozen=True)
class Pair:
    """A run and its control, from one base policy."""

    run: SplitCurve
    control: SplitCurve
    solved: Mapping[str, tuple[Solved, Solved]]
    """Name in COMPARED -> held-out results of both live policies after the last iteration."""


def read_solved(store: Store, experiment: str, iterations: int) -> dict[str, Solved]:
    """Held-out results of the live policy after the first `iterations`, by name in COMPARED.

    Raises ArtifactMissing if they were not measured.
    """
    last = [each for each in summaries(store, experiment) if each.decision][:iterations][-1]
    evaluation = read_artifact(store, experiment, "evaluation", last.iteration)
    who = "candidate" if last.decision == "live" else "parent"
    found: dict[str, Solved] = {}
    for measure, suffix in zip(COMPARED, ("_greedy", ""), strict=True):
        role = f"{who}_{Split.HELD_OUT.value}{suffix}"
        if evaluation is None or role not in evaluation.manifest.parents:
            raise ArtifactMissing(
                f"{experiment} lacks {measure} results on held-out tasks: set evaluation.held_out_samples to 1 or more"
                " and evaluation.greedy to true"
            )
        rewards = open_artifact(store, evaluation.manifest.parents[role]).table("rewards.parquet")
        found[measure] = solved_by_task(rewards)
    return found


def difference(pairs: Sequence[Mapping[str, tuple[Solved, Solved]]], measure: str) -> Difference:
    """Mean difference over seeds, run minus control. pairs: `Pair.solved` of each seed.

    The interval is the wider one of two: by task over all seeds, and Student's over the seeds' means. The first knows
    nothing of the chance in training, the second nothing of the tasks and little with few seeds. With one seed only
    the first exists.
    """
    tasks: tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]] = ({}, {})
    means = []
    for seed, pair in enumerate(pairs):
        means.append(paired_difference(*pair[measure]).mean)
        for pooled, own in zip(tasks, pair[measure], strict=True):
            pooled.update({f"{seed}/{task}": results for task, results in own.items()})
    by_task = paired_difference(*tasks)
    half = (by_task.high - by_task.low) / 2
    if len(means) > 1:
        seeds = len(means)
        half = max(half, student_quantile(0.5 + CONFIDENCE / 2, seeds - 1) * stdev(means) / math.sqrt(seeds))
    mean = fmean(means)
    return Difference(100 * mean, 100 * (mean - half), 100 * (mean + half))


def mean_gain(curves: Sequence[SplitCurve], measure: str) -> float:
    """Gain over the base policy after the last iteration, mean over seeds, in points."""
    return fmean(curve.final_gain(measure) for curve in curves)


def works(pairs: Sequence[Pair], measure: str) -> bool:
    """Whether the pass rate rose, and ended above the control's by more than the interval of the difference."""
    found = difference([pair.solved for pair in pairs], measure)
    return found.low > 0 and mean_gain([pair.run for pair in pairs], measure) > 0
