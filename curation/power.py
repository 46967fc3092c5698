"""Power of a gate: simulated refusal rate of candidates with a known true difference, with the code of the real
decision.

pass rates of tasks ~ Beta -> samples of candidate, parent, best so far -> `lower_bounds` of the paired differences >
-margin?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from curation.statistics import Numbers, lower_bounds

TRIALS = 10_000
"""Simulated evaluations behind a refusal rate: its standard error is at most half a point."""
SEQUENCES = 2_000
"""Simulated sequences of iterations."""
_CHUNK = 4_000_000
"""Task rates drawn at once."""


@dataclass(frozen=True)
class TaskRates:
    """Pass rates of tasks under one policy, as a Beta distribution."""

    mean: float
    deviation: float
    """Standard deviation between tasks."""
    origin: str
    """Source of the numbers, for display."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Numbers:
        """Draw rates of tasks."""
        spread = self.mean * (1 - self.mean)
        concentration = spread / min(max(self.deviation**2, 1e-6), spread * (1 - 1e-6)) - 1
        return generator.beta(self.mean * concentration, (1 - self.mean) * concentration, shape)


ASSUMED = TaskRates(0.5, (1 / 12) ** 0.5, "assumed: spread evenly from 0 to 100%, since no policy was evaluated yet")


@dataclass(frozen=True)
class Gate:
    """The settings that decide about a candidate."""

    tasks: int
    samples: int
    """Episodes per task."""
    margin: float
    confidence: float

    def passes(self, candidate: Numbers, other: Numbers) -> np.ndarray:
        """Whether each candidate is non-inferior. Both arguments contain shares of solved samples, [trials, tasks]."""
        passed: np.ndarray = lower_bounds(candidate - other, self.samples, self.confidence) > -self.margin
        return passed


@dataclass(frozen=True)
class Sequences:
    """Result of simulated sequences of iterations."""

    refused: float
    """Share of the candidates that were refused."""
    beyond: float
    """Share of the sequences that end with a true loss of more than the margin below the best policy that was ever
    live.
    """
    loss: float
    """Mean true loss at the end, in pass rate, below the best policy that was ever live."""


def measured_rates(outcomes: Mapping[str, Sequence[int]], origin: str) -> TaskRates | None:
    """Rates of tasks estimated from the 0/1 results of their samples, without the noise of sampling.

    None unless two tasks have two samples.
    """
    several = [values for values in outcomes.values() if len(values) > 1]
    if len(several) < 2:
        return None
    shares = [fmean(values) for values in several]
    noise = fmean(share * (1 - share) / (len(values) - 1) for share, values in zip(shares, several, strict=True))
    mean = min(max(fmean(shares), 0.01), 0.99)
    return TaskRates(mean, max(0.0, float(np.var(shares, ddof=1)) - noise) ** 0.5, origin)


def refusal_rate(gate: Gate, rates: TaskRates, difference: float, trials: int = TRIALS, seed: int = 0) -> float:
    """Share of evaluations that refuse a candidate whose true rate is `difference` above its parent's, the best so
    far.
    """
    generator = np.random.default_rng(seed)
    passed = 0
    for count in _chunks(trials, gate.tasks):
        tasks = rates.draw(generator, (count, gate.tasks))
        parent = sample(generator, tasks, gate.samples)
        candidate = sample(generator, moved(tasks, rates.mean, difference), gate.samples)
        passed += int(gate.passes(candidate, parent).sum())
    return 1 - passed / trials


def simulate_iterations(
    gate: Gate,
    rates: TaskRates,
    differences: Sequence[float],
    *,
    floor: bool = True,
    sequences: int = SEQUENCES,
    seed: int = 0,
) -> Sequences:
    """Simulate sequences of iterations whose candidates differ from the live policy by `differences`, in order.

    Evaluations are reused, as in production: the live policy's one evaluation serves all candidates until another
    policy goes live. floor: compare also with the live policy of the highest measured rate so far.
    """
    generator = np.random.default_rng(seed)
    refused, lost = 0.0, []
    for count in _chunks(sequences, gate.tasks):
        tasks = rates.draw(generator, (count, gate.tasks))
        live = np.zeros(count)
        peak = live.copy()
        run = sample(generator, tasks, gate.samples)
        best = run.copy()
        for difference in differences:
            true = np.clip(live + difference, -rates.mean, 1 - rates.mean)
            candidate = sample(generator, moved(tasks, rates.mean, true[:, None]), gate.samples)
            passed = gate.passes(candidate, run) & (gate.passes(candidate, best) if floor else True)
            refused += float((~passed).sum())
            live, run = np.where(passed, true, live), np.where(passed[:, None], candidate, run)
            higher = passed & (candidate.mean(-1) >= best.mean(-1))
            best, peak = np.where(higher[:, None], candidate, best), np.maximum(peak, live)
        lost.append(peak - live)
    losses = np.concatenate(lost)
    return Sequences(
        refused / (sequences * len(differences)), float((losses > gate.margin + 1e-9).mean()), float(losses.mean())
    )


def moved(tasks: Numbers, mean: float, difference: float | Numbers) -> Numbers:
    """Rates of the same tasks after their mean moves by `difference`: losses in proportion to the rate, gains in
    proportion to 1 - rate.
    """
    change = np.asarray(difference, np.float64)
    worse = tasks * (mean + change) / mean
    better = 1 - (1 - tasks) * (1 - mean - change) / (1 - mean)
    rates: Numbers = np.clip(np.where(change <= 0, worse, better), 0.0, 1.0)
    return rates


def sample(generator: np.random.Generator, tasks: Numbers, samples: int) -> Numbers:
    """Share of solved samples of each task."""
    return generator.binomial(samples, tasks) / samples


def _chunks(trials: int, tasks: int) -> Iterator[int]:
    """Split `trials` into sizes that fit in memory."""
    size = max(1, _CHUNK // tasks)
    for start in range(0, trials, size):
        yield min(size, trials - start)
