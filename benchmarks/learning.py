"""Pass rates on held-out compositions before and after learning, for several seeds, and for a control that must not
learn.

    base policy of seed s -> iterations -> the live policy after each, on held-out and unseen tasks
                                           (one child process an experiment)
    the first seeds' base policies with rewards permuted within each group: the control

No gate and no stopping rule uses these two splits. The work folder keeps everything, so that the same command resumes
after a kill.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from pydantic import Field

from benchmarks.curves import Curve, read_curve
from benchmarks.result import Result
from benchmarks.runs import PERMUTED, RunOptions, add_run, run_all
from benchmarks.workbench import Workbench
from resources.experiment import Experiment

TARGET_GAIN = 15.0
"""Required gain of the greedy pass rate over the base policy's, in points."""
TARGET_OVER_MAJORITY = 5.0
"""Required lead of the greedy pass rate over the base policy's maj@k, in points, which sharpening alone can't reach."""


class LearningOptions(RunOptions):
    """Options of the `learning` benchmark."""

    seeds: int = Field(5, ge=1, le=100)
    """Number of seeds, 0 to N-1, each with its own base policy."""
    controls: int = Field(3, ge=0, le=100)
    """Number of seeds, from 0, that also run with permuted rewards; with 0 the goals of controls are missed."""


OPTIONS = LearningOptions


def run(options: LearningOptions) -> Result:
    """Run missing iterations, then read the curves."""
    bench = Workbench.at(options.work)
    runs = _experiments(bench, options)
    run_all(bench, runs, options)
    curves: dict[str, Curve] = {}
    for each in runs:
        bench.enter(each.name)
        curves[each.name] = read_curve(bench.store, each.name, options.iterations)
    return Result(_metrics(curves), [_row(curve) for curve in curves.values()], [f"kept in {bench.root}"])


def _row(curve: Curve) -> dict[str, Any]:
    return curve.row(TARGET_GAIN, TARGET_OVER_MAJORITY)


def _metrics(curves: dict[str, Curve]) -> dict[str, float]:
    """Metrics. Of the seeds: shares, medians and the worst.

    Of the controls: the largest gain, after the last and after any iteration.
    """
    seeds = [curve for name, curve in curves.items() if name.startswith("learning_seed_")]
    controls = [curve for name, curve in curves.items() if name.startswith("learning_permuted_")]
    ended = [curve.held_out.ends_above(TARGET_GAIN, TARGET_OVER_MAJORITY) for curve in seeds]
    found = {"share_of_seeds_at_target": sum(ended) / len(seeds)}
    for measure in ("greedy", "sampled"):
        gains = sorted(curve.held_out.final_gain(measure) for curve in seeds)
        found |= {f"median_gain_{measure}": median(gains), f"worst_gain_{measure}": gains[0]}
        found[f"median_gain_unseen_{measure}"] = median(curve.unseen.final_gain(measure) for curve in seeds)
        if controls:
            found[f"gain_permuted_{measure}"] = max(curve.held_out.final_gain(measure) for curve in controls)
            found[f"best_gain_permuted_{measure}"] = max(max(curve.held_out.gains(measure)) for curve in controls)
    found["worst_over_base_majority"] = min(curve.held_out.over_majority()[-1] for curve in seeds)
    return found


def _experiments(bench: Workbench, options: LearningOptions) -> list[Experiment]:
    """Seeds begin first, so that most controls find their base policy in the store."""

    def add(name: str, seed: int, *overrides: str) -> Experiment:
        return add_run(bench, options, f"learning_{name}_{seed}", seed, *overrides)

    seeds = [add("seed", seed) for seed in range(options.seeds)]
    return seeds + [add("permuted", seed, PERMUTED) for seed in range(min(options.controls, options.seeds))]
