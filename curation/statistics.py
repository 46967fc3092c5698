"""How sure a comparison of two policies is: pass rates, paired differences, and the rule that refuses a worse policy. Pure functions.

Sources: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), for `wilson_interval`;
E. Miller, "Adding Error Bars to Evals" (arXiv:2411.00640), sections 2.2 (clustered errors) and 4 (paired differences), for
`paired_difference`; G. Piaggio et al., JAMA 308 (2012), for non-inferiority by the interval's lower end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

import pyarrow as pa

CONFIDENCE = 0.95
"""Two-sided, of every interval unless told otherwise."""


@dataclass(frozen=True)
class PassRate:
    """A share of solved episodes with its interval."""

    solved: int
    n: int
    """Graded episodes."""
    rate: float | None
    """None when nothing was graded."""
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Candidate minus parent, in pass rate, over the tasks that both played."""

    mean: float
    low: float
    high: float
    n: int
    """Tasks."""


@dataclass(frozen=True)
class Judgement:
    """Whether a rule holds, and the sentence that says why."""

    holds: bool
    sentence: str


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a proportion: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n). (0, 1) when n is 0.

    Raises ValueError unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}: expected 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    z = _z(confidence)
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def paired_difference(
    candidate: Mapping[str, Sequence[int]], parent: Mapping[str, Sequence[int]], confidence: float = CONFIDENCE
) -> PairedDifference:
    """Difference in pass rate with each task as one cluster: samples of one task are not independent of each other.

    Both map task id to the 0/1 of its samples; tasks that only one has (or has no graded sample of) are left out. With
    d_t = mean(candidate_t) - mean(parent_t) over n tasks: mean(d) ± z √(var(d) / n), the sample variance, cut to [-1, 1].
    Below two tasks the interval is [-1, 1].
    """
    shared = sorted(task for task in candidate if candidate[task] and parent.get(task))
    differences = [fmean(candidate[task]) - fmean(parent[task]) for task in shared]
    n = len(differences)
    mean = fmean(differences) if differences else 0.0
    if n < 2:
        return PairedDifference(mean, -1.0, 1.0, n)
    half = _z(confidence) * math.sqrt(variance(differences) / n)
    return PairedDifference(mean, max(-1.0, mean - half), min(1.0, mean + half), n)


def non_inferior(difference: PairedDifference, margin: float) -> Judgement:
    """Whether the candidate is at worst `margin` below its parent: the interval's lower end must lie above -margin.

    margin: in pass rate, e.g. 0.05. Raises ValueError when negative.
    """
    if margin < 0:
        raise ValueError(f"margin {margin}: expected 0 or more")
    holds = difference.low > -margin
    span = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] over {difference.n} tasks"
    relation = "above" if holds else "not above"
    verdict = "non-inferior" if holds else "not shown to be non-inferior"
    return Judgement(holds, f"candidate is {verdict}: {span}, its lower end {relation} the margin of {-margin:+.3f}")


def pass_rate(rewards: pa.Table, confidence: float = CONFIDENCE) -> PassRate:
    """The share of solved episodes in a table with the column `solved` (REWARDS); ungraded ones don't count.

    The interval takes episodes as independent: it is Wilson's, too narrow where tasks have several samples each.
    """
    outcomes = [value for value in rewards["solved"].to_pylist() if value is not None]
    solved, n = sum(outcomes), len(outcomes)
    return PassRate(solved, n, solved / n if n else None, *wilson_interval(solved, n, confidence))


def solved_by_task(rewards: pa.Table) -> dict[str, list[int]]:
    """The 0/1 of each task's graded samples, in row order: what `paired_difference` compares."""
    found: dict[str, list[int]] = {}
    for task, solved in zip(rewards["task_id"].to_pylist(), rewards["solved"].to_pylist(), strict=True):
        if solved is not None:
            found.setdefault(task, []).append(int(solved))
    return found


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)
