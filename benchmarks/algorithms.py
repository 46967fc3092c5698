"""Every policy-gradient algorithm on one experiment, beside its control: which of them learn?

    base policy of seed s -> iterations by each algorithm                       -> held-out pass rates
                          -> the same with rewards permuted within each group   -> the control, which must not learn

An algorithm works if its temperature-1 pass rate on held-out tasks rises, and ends above its control's by more than the
interval of the difference. No decision reads held-out tasks. The work folder keeps everything, so that the same command
resumes after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from pydantic import Field, field_validator

from benchmarks.controlled import COMPARED, Pair, difference, mean_gain, read_solved, works
from benchmarks.curves import Scores, SplitCurve, read_curve
from benchmarks.panels import Panel, draw_panels
from benchmarks.result import Result
from benchmarks.runs import PERMUTED, RunOptions, add_run, run_all
from benchmarks.workbench import Workbench
from resources.experiment import Experiment
from trainer.algorithms import Algorithm

KINDS: tuple[str, ...] = tuple(kind.model_fields["kind"].default for kind in get_args(get_args(Algorithm)[0]))
"""Every algorithm of the trainer."""
DECISIVE = "sampled"
"""The measure that decides. Greedy moves by chance where two answers are close; see README.md."""
ENOUGH_SEEDS = 3
"""Seeds below which goals are not judged."""
PICTURE = "algorithms.svg"


class AlgorithmsOptions(RunOptions):
    """Options of the `algorithms` benchmark."""

    seeds: int = Field(3, ge=1, le=100)
    """Number of seeds, 0 to N-1, each with its own base policy. Goals are judged from 3 seeds on."""
    algorithms: str = " ".join(KINDS)
    """Algorithms to run, separated by blanks. `trainer.algorithm` has the experiment's settings for its own kind, and
    the defaults of each other kind.
    """
    plot: str = ""
    """SVG file for the curves; empty: algorithms.svg in the work folder."""

    @field_validator("algorithms")
    @classmethod
    def _known(cls, value: str) -> str:
        unknown = sorted(set(value.split()) - set(KINDS))
        if unknown or not value.split():
            raise ValueError(f"expected some of {', '.join(KINDS)}, not {', '.join(unknown) or 'nothing'}")
        return value


OPTIONS = AlgorithmsOptions


def run(options: AlgorithmsOptions) -> Result:
    """Run missing iterations, then compare every algorithm with its control."""
    bench = Workbench.at(options.work)
    kinds = list(dict.fromkeys(options.algorithms.split()))
    run_all(bench, [run for seed in range(options.seeds) for run in _experiments(bench, options, kinds, seed)], options)
    pairs = {kind: [_read(bench, kind, seed, options.iterations) for seed in range(options.seeds)] for kind in kinds}
    picture = Path(options.plot or bench.root / PICTURE)
    picture.write_text(draw_panels({kind: _panels(found) for kind, found in pairs.items()}))
    complete = options.seeds >= ENOUGH_SEEDS and set(kinds) == set(KINDS)
    notes = [f"kept in {bench.root}, curves in {picture}", *_lacking(options, kinds)]
    return Result(metrics(pairs), [row(kind, found) for kind, found in pairs.items()], notes, judged=complete)


def metrics(pairs: Mapping[str, Sequence[Pair]]) -> dict[str, float]:
    """Algorithms that work or don't, the largest gain of a control, and each difference, in points."""
    working = [kind for kind, found in pairs.items() if works(found, DECISIVE)]
    controls = [pair.control for found in pairs.values() for pair in found]
    found = {
        "algorithms": float(len(pairs)),
        "not_working": float(len(pairs) - len(working)),
        "control_gain_sampled": max(curve.final_gain("sampled") for curve in controls),
        "control_gain_greedy": max(curve.final_gain("greedy") for curve in controls),
    }
    for kind, own in pairs.items():
        found |= {f"{kind}_{name}": difference([each.solved for each in own], name).mean for name in COMPARED}
    return found


def row(kind: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Table row of one algorithm: pass rates in percent, means over seeds; gains and differences in points."""
    runs, controls = [pair.run for pair in pairs], [pair.control for pair in pairs]
    found: dict[str, Any] = {"algorithm": kind}
    for measure, name in zip(COMPARED, ("greedy", "T=1"), strict=True):
        base, last = (100 * fmean(scores[measure] for scores in each) for each in _ends(runs))
        found[f"{name}: base -> last"] = f"{base:.1f} -> {last:.1f}"
        found[f"{name} gain"] = f"{mean_gain(runs, measure):+.1f}"
        found[f"{name} gain of control"] = f"{mean_gain(controls, measure):+.1f}"
        found[f"{name} over control"] = str(difference([pair.solved for pair in pairs], measure))
    return found | {"works": "yes" if works(pairs, DECISIVE) else "NO"}


def _ends(runs: Sequence[SplitCurve]) -> tuple[list[Scores], list[Scores]]:
    return [run.base for run in runs], [run.live[-1] for run in runs]


def _lacking(options: AlgorithmsOptions, kinds: Sequence[str]) -> list[str]:
    if options.seeds >= ENOUGH_SEEDS and set(kinds) == set(KINDS):
        return []
    return [f"goals are not judged: they need all {len(KINDS)} algorithms and {ENOUGH_SEEDS} seeds"]


def _experiments(bench: Workbench, options: AlgorithmsOptions, kinds: Sequence[str], seed: int) -> list[Experiment]:
    """Runs of one seed, which share a base policy; each algorithm's control follows it."""
    found = []
    for kind in kinds:
        chosen = f"trainer.algorithm.kind={kind}"
        found.append(add_run(bench, options, _name(kind, seed), seed, chosen))
        found.append(add_run(bench, options, _name(kind, seed, permuted=True), seed, chosen, PERMUTED))
    return found


def _name(kind: str, seed: int, *, permuted: bool = False) -> str:
    return f"algorithms_{kind}{'_permuted' if permuted else ''}_{seed}"


def _read(bench: Workbench, kind: str, seed: int, iterations: int) -> Pair:
    curves, solved = [], []
    for name in (_name(kind, seed), _name(kind, seed, permuted=True)):
        bench.enter(name)
        curves.append(read_curve(bench.store, name, iterations).held_out)
        solved.append(read_solved(bench.store, name, iterations))
    run, control = solved
    return Pair(curves[0], curves[1], {measure: (run[measure], control[measure]) for measure in COMPARED})


def _panels(pairs: Sequence[Pair]) -> dict[str, Panel]:
    def curves(measure: str, runs: Sequence[SplitCurve]) -> list[list[float]]:
        return [[run.base[measure], *(scores[measure] for scores in run.live)] for run in runs]

    return {
        name: Panel(curves(measure, [pair.run for pair in pairs]), curves(measure, [pair.control for pair in pairs]))
        for measure, name in zip(COMPARED, ("greedy", "temperature 1"), strict=True)
    }
