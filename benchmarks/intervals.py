"""Simulated coverage of printed intervals and refusal rates of the gate, computed with the production functions.

pass rates of tasks ~ Beta(mean, correlation within tasks) -> samples -> interval -> does it contain the true value?

Results are counts, so the coverage at one true value depends on how the steps between counts fall and oscillates around
what the method gives (L. Brown, T. Cai and A. DasGupta, Statistical Science 16, 2001). Each row therefore has two
figures: `covered %` at exactly its true value, and `covered near %` with the true value drawn anew within NEARBY of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import Field

from benchmarks.result import Options, Result
from curation.power import ASSUMED, Gate, TaskRates, moved, refusal_rate, sample, simulate_iterations
from curation.statistics import (
    CONFIDENCE,
    Numbers,
    difference_errors,
    non_inferior,
    paired_difference,
    rate_intervals,
    student_quantile,
)

SAMPLES = (1, 2, 4, 8)
MEANS = (0.2, 0.5, 0.8, 0.95)
CORRELATIONS = (0.05, 0.3, 0.7)
"""Shares of one sample's variance that lie between tasks."""
LOSSES = (0.0, -0.03)
NEARBY = 0.04
"""True values of `covered near %` are uniform within this distance, in pass rate, of the row's own."""
FEW_TASKS = 14
"""Number of tasks of one family, as in reports."""
RESAMPLES, RESAMPLED = 1000, 2000
"""Resamples of the percentile bootstrap, shown for comparison, and the trials it is shown on."""
DECISIONS = 4000
"""Decisions of the gate behind each share of refusals."""
GATES = {"128 tasks x 2": Gate(128, 2, 0.05, 0.90), "128 tasks x 8": Gate(128, 8, 0.05, 0.90)}


class IntervalOptions(Options):
    """Options of the `intervals` benchmark."""

    tasks: int = Field(128, ge=8, le=10_000)
    """Number of tasks in a split."""
    trials: int = Field(20_000, ge=100, le=100_000)
    """Simulated evaluations per coverage."""
    iterations: int = Field(20, ge=1, le=1000)
    """Iterations per sequence of gate decisions."""
    seed: int = Field(0, ge=0)
    """Seed of the simulation."""


OPTIONS = IntervalOptions


def run(options: IntervalOptions) -> Result:
    """Coverage of rates and differences, then the gate's errors."""
    generator = np.random.default_rng(options.seed)
    rows, metrics = [], dict[str, float]()
    for samples in SAMPLES:
        few, rates = (
            [_rate_row(options, generator, tasks, samples, mean, share) for mean in MEANS for share in CORRELATIONS]
            for tasks in (FEW_TASKS, options.tasks)
        )
        differences = [
            _difference_row(options, generator, samples, mean, share, loss)
            for mean in MEANS
            for share in CORRELATIONS
            for loss in LOSSES
        ]
        rows += few + rates + differences
        for name, found in (("few_tasks_rate", few), ("rate", rates), ("difference", differences)):
            for near, covered in (("", _column(found, "covered %")), ("near_", _column(found, "covered near %"))):
                metrics |= {
                    f"{name}_{near}mean_{samples}": sum(covered) / len(covered),
                    f"{name}_{near}least_{samples}": min(covered),
                    f"{name}_{near}most_{samples}": max(covered),
                }
    for name, tasks in (("", options.tasks), ("few_tasks_", FEW_TASKS)):
        for near, column in (("", "covered %"), ("near_", "covered near %")):
            covered = _column([row for row in rows if row["tasks"] == tasks], column)
            metrics[f"{name}{near}share_within_93_97"] = sum(93 <= each <= 97 for each in covered) / len(covered)
    metrics["rows_below_93"] = float(sum(row["covered %"] < 93 for row in rows))
    metrics |= _gate_metrics(options)
    notes = [f"nominal {CONFIDENCE:.0%}; {options.tasks} tasks, {options.trials} trials a row; gates: margin 5 points"]
    return Result(metrics, rows, notes)


def task_rates(mean: float, share: float) -> TaskRates:
    """Task rates with this mean, and this share of one sample's variance between tasks."""
    return TaskRates(mean, (share * mean * (1 - mean)) ** 0.5, "simulated")


def _rate_row(
    options: IntervalOptions, generator: np.random.Generator, tasks: int, samples: int, mean: float, share: float
) -> Mapping[str, Any]:
    solved = sample(generator, task_rates(mean, share).draw(generator, (options.trials, tasks)), samples) * samples
    ours = _rate_intervals(solved, samples)
    means = np.clip(mean + _offsets(generator, options), 0.01, 0.99)
    near = np.stack([task_rates(each, share).draw(generator, (tasks,)) for each in means])
    drawn = solved[:RESAMPLED] @ _weights(tasks).T / samples
    bootstrap = np.quantile(drawn, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=1).T
    return _row(
        "rate",
        tasks,
        samples,
        mean,
        share,
        0.0,
        {
            "covered %": _covered(ours, mean),
            "covered near %": _covered(_rate_intervals(sample(generator, near, samples) * samples, samples), means),
            "width": float(np.diff(ours).mean()),
            "percentile bootstrap %": _covered(bootstrap, mean),
            "Wilson over episodes %": _covered(_wilson(solved.sum(-1), tasks * samples), mean),
        },
    )


def _difference_row(
    options: IntervalOptions, generator: np.random.Generator, samples: int, mean: float, share: float, loss: float
) -> Mapping[str, Any]:
    tasks = task_rates(mean, share).draw(generator, (options.trials, options.tasks))
    before = sample(generator, tasks, samples)
    found = sample(generator, moved(tasks, mean, loss), samples) - before
    ours = _difference_intervals(found, samples)
    losses = np.clip(loss + _offsets(generator, options), 0.01 - mean, 0.99 - mean)
    candidate = np.stack([moved(row, mean, each) for row, each in zip(tasks, losses, strict=True)])
    bootstrap = np.quantile(
        found[:RESAMPLED] @ _weights(options.tasks).T, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=1
    ).T
    return _row(
        "difference",
        options.tasks,
        samples,
        mean,
        share,
        loss,
        {
            "covered %": _covered(ours, loss),
            "covered near %": _covered(
                _difference_intervals(sample(generator, candidate, samples) - before, samples), losses
            ),
            "width": float(np.diff(ours).mean()),
            "percentile bootstrap %": _covered(bootstrap, loss),
            "Wilson over episodes %": None,
        },
    )


def _row(
    what: str, tasks: int, samples: int, mean: float, share: float, loss: float, found: Mapping[str, float | None]
) -> Mapping[str, Any]:
    place = {
        "interval of": what,
        "tasks": tasks,
        "samples": samples,
        "mean": mean,
        "between tasks": share,
        "true difference": loss,
    }
    return {**place, **{name: None if value is None else round(value, 3) for name, value in found.items()}}


@lru_cache(maxsize=8)
def _weights(tasks: int) -> Numbers:
    """Share of each task in each resample, [RESAMPLES, tasks]."""
    drawn = np.random.default_rng(tasks).multinomial(tasks, [1 / tasks] * tasks, size=RESAMPLES)
    shares: Numbers = drawn / tasks
    return shares


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows]


def _offsets(generator: np.random.Generator, options: IntervalOptions) -> Numbers:
    return generator.uniform(-NEARBY, NEARBY, options.trials)


def _rate_intervals(solved: Numbers, samples: int) -> Numbers:
    return np.stack(rate_intervals(solved, np.full(solved.shape[-1], float(samples))), axis=1)


def _difference_intervals(found: Numbers, samples: int) -> Numbers:
    half = student_quantile(0.5 + CONFIDENCE / 2, found.shape[-1] - 1) * difference_errors(found, samples)
    return np.stack([found.mean(-1) - half, found.mean(-1) + half], axis=1)


def _covered(intervals: Numbers, true: Numbers | float) -> float:
    return 100 * float(((intervals[:, 0] <= true + 1e-9) & (true - 1e-9 <= intervals[:, 1])).mean())


def _wilson(solved: Numbers, n: int) -> Numbers:
    """Wilson's interval with every episode as an observation, for comparison with intervals by task."""
    a = student_quantile(0.5 + CONFIDENCE / 2, 10**6) ** 2 / n
    rate = solved / n
    centre, half = (rate + a / 2) / (1 + a), np.sqrt(a * a / 4 + a * rate * (1 - rate)) / (1 + a)
    return np.stack([centre - half, centre + half], axis=1)


def _refused(gate: Gate, rates: TaskRates, difference: float, options: IntervalOptions) -> float:
    """Share of refusals among decisions made from the 0/1 results of every episode, as in an evaluation."""
    generator = np.random.default_rng(options.seed + 1)
    refused = 0
    for _ in range(DECISIONS):
        tasks = rates.draw(generator, (gate.tasks,))
        policies = (moved(tasks, rates.mean, difference), tasks)
        candidate, parent = (
            {
                str(task): row
                for task, row in enumerate(generator.binomial(1, shares[:, None], (gate.tasks, gate.samples)).tolist())
            }
            for shares in policies
        )
        refused += not non_inferior(paired_difference(candidate, parent, gate.confidence), gate.margin).holds
    return refused / DECISIONS


def _gate_metrics(options: IntervalOptions) -> dict[str, float]:
    """Refusals in percent, and total losses of sequences with and without the floor, for tasks such as `solves 80%, sd
    28 points`.
    """
    rates = replace(ASSUMED, mean=0.8, deviation=0.28)
    found: dict[str, float] = {}
    for name, gate in GATES.items():
        short = name.replace(" tasks x ", "x")
        for loss in (0.0, 0.03, gate.margin, 2 * gate.margin):
            printed = refusal_rate(gate, rates, -loss)
            again = _refused(gate, rates, -loss, options)
            found[f"refused_{short}_{100 * loss:.0f}"] = 100 * printed
            found["refused_off_most"] = max(found.get("refused_off_most", 0.0), 100 * abs(printed - again))
        for floor, label in ((False, "parent"), (True, "floor")):
            worse = simulate_iterations(gate, rates, [-0.03] * options.iterations, floor=floor)
            even = simulate_iterations(gate, rates, [0.0] * options.iterations, floor=floor)
            found[f"beyond_margin_{short}_{label}"] = 100 * worse.beyond
            found[f"points_lost_{short}_{label}"] = 100 * worse.loss
            found[f"equal_refused_{short}_{label}"] = 100 * even.refused
    return found
