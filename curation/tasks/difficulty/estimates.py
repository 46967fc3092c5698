"""Pass rate of one task and pass@k from n samples of which c are solved. Pure functions.

The interval of a task's rate is `rate_interval` with one sample a unit, which is Wilson's score interval. Averaged over
rates spread evenly over (0, 1) it covers the true rate in 95.6% (n = 2) to 95.2% (n = 64) of cases, where the exact
interval of Clopper and Pearson covers 99.7% to 96.8%: it is wider than 95% needs, most of all for few samples.

Sources: M. Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1, for
pass@k; L. Brown, T. Cai and A. DasGupta, "Interval Estimation for a Binomial Proportion", Statistical Science 16
(2001), for the choice of the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from curation.statistics import rate_interval


@dataclass(frozen=True)
class Estimate:
    """What n graded samples tell of one task."""

    samples: int
    solved: int
    rate: float | None
    """Share of solved samples; None if nothing was graded."""
    low: float
    high: float
    """low and high: interval of the rate, at 95%."""
    pass_at_k: float | None
    """None if fewer than k samples were graded."""


def estimate(solved: int, samples: int, k: int) -> Estimate:
    """Estimate from `solved` of `samples` graded samples.

    Raises ValueError unless 0 <= solved <= samples and k >= 1.
    """
    if not 0 <= solved <= samples or k < 1:
        raise ValueError(f"{solved} of {samples} samples with k = {k}: expected 0 <= solved <= samples and k >= 1")
    low, high = rate_interval([1.0] * solved + [0.0] * (samples - solved), [1.0] * samples)
    rate = solved / samples if samples else None
    return Estimate(samples, solved, rate, low, high, pass_at_k(solved, samples, k) if samples >= k else None)


def pass_at_k(solved: int, samples: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is solved: 1 - C(n - c, k) / C(n, k).

    Raises ValueError unless 0 <= solved <= samples and 1 <= k <= samples.
    """
    if not (0 <= solved <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {solved} of {samples} samples: expected 1 <= k <= samples, solved <= samples")
    return 1 - comb(samples - solved, k) / comb(samples, k)
