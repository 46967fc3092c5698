"""Pass rates, paired differences, their intervals, and the rule that refuses a worse policy. Pure functions.

The task is the unit: samples of one task are not independent of each other. Every interval equals that of resampling
whole tasks (the cluster bootstrap), with the standard error in closed form: the mean of n tasks drawn with replacement
has exactly the variance sum (y_t - mean y)^2 / n^2, so no random draws are needed. Critical values are normal for
rates, whose variance is bounded by the rate itself, and Student's with n - 1 degrees of freedom for differences.
`python -m benchmarks intervals` measures the coverage, beside percentile bootstrap and Wilson's interval over episodes.

Sources: B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapters 6 and 12.2; E. Miller, "Adding
Error Bars to Evals" (arXiv:2411.00640), sections 2.2 (clustered errors) and 4 (paired differences); E. B. Wilson, JASA
22 (1927), for the score form of a rate's interval, and E. Korn and B. Graubard, Survey Methodology 24 (1998), for its
use with an effective number of observations; D. Bonett and R. Price, J. Educ. Behav. Stat. 37 (2012), for
pseudo-observations in paired differences; G. Piaggio et al., JAMA 308 (2012), for non-inferiority by the interval's
lower end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

CONFIDENCE = 0.95
"""Two-sided confidence of every interval, unless stated otherwise."""
PSEUDO_VARIANCE = 0.125
"""Variance of half an observation at rate 1/2, added to the variance between tasks and to its bound: if no task fails,
each task counts as one observation, whatever its number of samples.
"""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class PassRate:
    """Share of solved episodes with its interval."""

    solved: int
    n: int
    """Graded episodes."""
    rate: float | None
    """None if nothing was graded."""
    low: float
    high: float
    tasks: int
    """Tasks with a graded episode, which are the units of resampling."""


@dataclass(frozen=True)
class PairedDifference:
    """Difference in pass rate, candidate minus another policy, over the tasks that both attempted."""

    mean: float
    low: float
    high: float
    """low and high: the two-sided interval at CONFIDENCE."""
    n: int
    """Tasks."""
    bound: float
    """Lower end of the two-sided interval at the gate's own confidence, for `non_inferior`."""


@dataclass(frozen=True)
class NonInferiority:
    """Result of a test for non-inferiority, with the sentence that explains it."""

    holds: bool
    sentence: str


def rate_interval(
    solved: Sequence[float], samples: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of sum(solved) / sum(samples), by task: Wilson's score interval with the effective number of
    observations.

    solved, samples: one value per task, solved <= samples; tasks without samples are left out. With y_t the task's
    share, weighted by its samples, n tasks and rate p: a task is worth 1 / c observations, c = (sum (y_t - p)^2 + v) /
    (p (1 - p) (n - 1) + v) <= 1, v = PSEUDO_VARIANCE. With one sample a task this is Wilson's interval itself. (0, 1)
    below two tasks.
    """
    counts = np.asarray(samples, np.float64)
    wins = np.asarray(solved, np.float64)[counts > 0]
    counts = counts[counts > 0]
    n = len(counts)
    if bool((wins < 0).any() or (wins > counts).any()):
        raise ValueError("solved samples of a task are out of range: expected 0 <= solved <= samples")
    if n < 2:
        return 0.0, 1.0
    low, high = rate_intervals(wins, counts, confidence)
    return float(low), float(high)


def rate_intervals(wins: Numbers, counts: Numbers, confidence: float = CONFIDENCE) -> tuple[Numbers, Numbers]:
    """Both ends of `rate_interval` over the last axis of wins, [..., tasks], with 2 tasks or more and counts > 0."""
    n = counts.shape[-1]
    rate = wins.sum(-1) / counts.sum()
    between = (((wins - rate[..., None] * counts) / counts.mean()) ** 2).sum(-1)
    share = np.minimum(1.0, (between + PSEUDO_VARIANCE) / (rate * (1 - rate) * (n - 1) + PSEUDO_VARIANCE))
    a = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2 * share / n
    centre, half = (rate + a / 2) / (1 + a), np.sqrt(a * a / 4 + a * rate * (1 - rate)) / (1 + a)
    low = np.where(rate == 0, 0.0, np.maximum(0.0, centre - half))
    high = np.where(rate == 1, 1.0, np.minimum(1.0, centre + half))
    return low, high


def difference_errors(differences: Numbers, samples: float) -> Numbers:
    """Standard error of the mean over the last axis, [..., tasks], by task: sqrt((sum (d_t - mean d)^2 + 1 / samples^2)
    / (n (n - 1))).

    samples: per task. The added term is that of one task in which the policies differ by one sample: without any
    observed difference the error is still above 0.
    """
    n = differences.shape[-1]
    squares = ((differences - differences.mean(-1, keepdims=True)) ** 2).sum(-1) + 1 / samples**2
    errors: Numbers = np.sqrt(squares / (n * (n - 1)))
    return errors


def lower_bounds(differences: Numbers, samples: float, confidence: float) -> Numbers:
    """Lower end of the two-sided interval of the mean difference over the last axis of [..., tasks]; the gate uses
    it.
    """
    critical = student_quantile(0.5 + confidence / 2, differences.shape[-1] - 1)
    bounds: Numbers = differences.mean(-1) - critical * difference_errors(differences, samples)
    return bounds


def paired_difference(
    candidate: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]], gate_confidence: float = CONFIDENCE
) -> PairedDifference:
    """Difference in pass rate, with equal weight for each task.

    Both map a task id to the 0/1 results of its samples; tasks without a graded sample of both policies are left out.
    With d_t = mean(candidate_t) - mean(other_t): mean(d) +- t * `difference_errors`, cut to [-1, 1]. Below two tasks
    the interval is [-1, 1]. gate_confidence: confidence of the two-sided interval whose lower end is `bound`.
    """
    shared = sorted(task for task in candidate if candidate[task] and other.get(task))
    differences = np.asarray([fmean(candidate[task]) - fmean(other[task]) for task in shared], np.float64)
    n = len(shared)
    if n < 2:
        return PairedDifference(float(differences.mean()) if n else 0.0, -1.0, 1.0, n, -1.0)
    samples = fmean(min(len(candidate[task]), len(other[task])) for task in shared)
    mean, bound = float(differences.mean()), float(lower_bounds(differences, samples, gate_confidence))
    half = student_quantile(0.5 + CONFIDENCE / 2, n - 1) * float(difference_errors(differences, samples))
    return PairedDifference(mean, max(-1.0, mean - half), min(1.0, mean + half), n, max(-1.0, bound))


def non_inferior(difference: PairedDifference, margin: float, other: str = "its parent") -> NonInferiority:
    """Whether the candidate is at most `margin` below the other policy: the difference's `bound` must be above -margin.

    margin: in pass rate, e.g. 0.05. other: name of the other policy in the text. Raises ValueError if margin is
    negative.
    """
    if margin < 0:
        raise ValueError(f"margin {margin}: expected 0 or more")
    holds = difference.bound > -margin
    span = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] over {difference.n} tasks"
    relation = "above" if holds else "not above"
    verdict = "non-inferior to" if holds else "not shown to be non-inferior to"
    return NonInferiority(
        holds,
        f"candidate is {verdict} {other}: {span}, its lower bound {difference.bound:+.3f} is {relation} the margin of"
        f" {-margin:+.3f}",
    )


def pass_rate(rewards: pa.Table, confidence: float = CONFIDENCE) -> PassRate:
    """Share of solved episodes in a table with the columns `task_id` and `solved` (REWARDS), without ungraded ones."""
    outcomes = solved_by_task(rewards)
    solved, samples = [sum(values) for values in outcomes.values()], [len(values) for values in outcomes.values()]
    n = sum(samples)
    low, high = rate_interval(solved, samples, confidence)
    return PassRate(sum(solved), n, sum(solved) / n if n else None, low, high, len(outcomes))


def solved_by_task(rewards: pa.Table) -> dict[str, list[int]]:
    """0/1 results of each task's graded samples, in row order, for `paired_difference`."""
    found: dict[str, list[int]] = {}
    for task, solved in zip(rewards["task_id"].to_pylist(), rewards["solved"].to_pylist(), strict=True):
        if solved is not None:
            found.setdefault(task, []).append(int(solved))
    return found


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution. Raises ValueError unless freedom >= 1 and 0 < probability < 1.

    Exact for 1 and 2 degrees of freedom; above, the expansion in 1 / freedom of Abramowitz and Stegun, 26.7.5. Up to
    probability 0.975 it is too small by at most 0.004 at 3 degrees and 1e-5 at 10, up to 0.995 by 0.05 and 1e-4.
    """
    if freedom < 1 or not 0 < probability < 1:
        raise ValueError(f"quantile {probability} at {freedom} degrees of freedom: expected 0 to 1, and 1 or more")
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
