"""Pass rates on held-out compositions before and after learning, for several seeds, and for a control that must not
learn.

    base policy of seed s -> iterations -> the live policy after each, on held-out and unseen tasks
                                           (one child process an experiment)
    the first seeds' base policies with rewards permuted within each group: the control

No gate and no stopping rule uses these two splits. The work folder keeps everything, so that the same command resumes
after a kill.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from benchmarks.curves import Curve, read_curve
from benchmarks.processes import Children
from benchmarks.result import Options, Result
from benchmarks.workbench import DEFAULT_FOLDER, Workbench
from contracts.errors import TriplaneError
from resources.experiment import Experiment
from resources.progress import Progress
from resources.refs import partitions
from triplane_dagster.assembly import experiments_folder
from triplane_dagster.cli.bars import Bars

TARGET_GAIN = 15.0
"""Required gain of the greedy pass rate over the base policy's, in points."""
TARGET_OVER_MAJORITY = 5.0
"""Required lead of the greedy pass rate over the base policy's maj@k, in points, which sharpening alone can't reach."""
POLL_S = 5.0
CONTROL = "trainer.permute_rewards=true"


class LearningOptions(Options):
    """Options of the `learning` benchmark."""

    seeds: int = Field(5, ge=1, le=100)
    """Number of seeds, 0 to N-1, each with its own base policy."""
    iterations: int = Field(3, ge=1, le=1000)
    """Iterations of each seed and of each control."""
    jobs: int = Field(2, ge=1, le=64)
    """Concurrent experiments, of one thread each."""
    experiment: str = "quickstart"
    """The experiment to repeat."""
    work: str = DEFAULT_FOLDER
    """Folder that is kept and resumed."""
    controls: int = Field(3, ge=0, le=100)
    """Number of seeds, from 0, that also run with permuted rewards; with 0 the goals of controls are missed."""
    set: str = ""
    """Further overrides, separated by blanks, e.g. "prompts.groups=16 tasks.train=64"."""


OPTIONS = LearningOptions


def run(options: LearningOptions) -> Result:
    """Run missing iterations, then read the curves."""
    bench = Workbench.at(options.work)
    runs = _experiments(bench, options)
    _run_all(bench, runs, options)
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
    source = experiments_folder() / f"{options.experiment}.yaml"
    shared = [
        *options.set.split(),
        "trainer.launcher.threads=1",
        "engine.threads=1",
        "promotion.on_refusal=retry_from_live",
    ]

    def add(name: str, seed: int, *overrides: str) -> Experiment:
        return bench.add_experiment(source, f"learning_{name}_{seed}", [*shared, f"seed={seed}", *overrides])

    seeds = [add("seed", seed) for seed in range(options.seeds)]
    return seeds + [add("permuted", seed, CONTROL) for seed in range(min(options.controls, options.seeds))]


def _run_all(bench: Workbench, runs: list[Experiment], options: LearningOptions) -> None:
    """Run every experiment to its number of iterations, with progress bars.

    Seeds begin first, so that most controls find their base policy in the store.
    """
    children = Children()
    with Bars() as bars, ThreadPoolExecutor(options.jobs) as pool:
        try:
            waiting = {pool.submit(_iterate, children, bench, each, options) for each in runs}
            while waiting:
                ended, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
                for future in ended:
                    future.result()
                for each in runs:
                    done = min(len(partitions(bench.store, each.name, "sampler")), options.iterations)
                    bars(Progress(each.name, None, "iterations", done, options.iterations))
        except BaseException:
            children.stop()
            raise


def _iterate(children: Children, bench: Workbench, experiment: Experiment, options: LearningOptions) -> None:
    """Run an experiment to its number of iterations in a child process, as a user would.

    Raises TriplaneError with the log's path.
    """
    log = bench.root / "logs" / f"{experiment.name}.log"
    command = [sys.executable, "-m", "triplane_dagster.cli", "demo", "-e", experiment.name, "--json"]
    command += ["--set", f"iterations={options.iterations}"]
    environment = bench.environment(experiment.name)
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
    code = children.run(command, environment, log)
    if code:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        raise TriplaneError(
            f"{experiment.name} ended with code {code} ({''.join(tail)[:300]}): see {log}, then run this again"
        )
