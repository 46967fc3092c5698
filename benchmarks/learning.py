"""Does it learn? Held-out pass rate of the live policy over iterations, for several seeds, and for controls that must not learn.

    base policy of seed s -> iterations -> held-out pass rate of the live policy after each      one child process an experiment
    the first seed's base policy with rewards permuted within each group, and with learning rate 0: the controls

Held-out is read by no gate and no stopping rule. Everything is kept in the work folder: killed, the same command goes on where it was.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from pydantic import Field

from benchmarks.curves import Curve, read_curve
from benchmarks.processes import Children
from benchmarks.result import Options, Result
from benchmarks.workbench import DEFAULT_FOLDER, Workbench
from contracts.errors import TriplaneError
from resources.experiment import Experiment
from resources.progress import Progress
from triplane_dagster.assembly import experiments_folder
from triplane_dagster.cli.bars import Bars
from triplane_dagster.cli.history import partitions

TARGET_POINTS = 25.0
POLL_S = 5.0
CONTROLS = {
    "permuted_rewards": "trainer.grpo.permute_rewards=true",
    "learning_rate_0": "trainer.grpo.learning_rate=0",
}


class LearningOptions(Options):
    """Options of the `learning` benchmark."""

    seeds: int = Field(5, ge=1, le=100)
    """Seeds 0 to N-1, each with a base policy of its own."""
    iterations: int = Field(10, ge=1, le=1000)
    """Iterations of each seed and control."""
    jobs: int = Field(1, ge=1, le=64)
    """Experiments at once. More than one take one thread each."""
    experiment: str = "quickstart"
    """The experiment to repeat."""
    work: str = DEFAULT_FOLDER
    """Folder that is kept and resumed."""
    controls: bool = True
    """Whether the controls run; without them their goals are missed."""
    set: str = ""
    """Further overrides, separated by blanks, e.g. "prompts.groups=16 tasks.train=64"."""


OPTIONS = LearningOptions


def run(options: LearningOptions) -> Result:
    """Run what is missing, then read the curves."""
    bench = Workbench.at(options.work)
    runs = _experiments(bench, options)
    _run_all(bench, runs, options)
    curves: dict[str, Curve] = {}
    for each in runs:
        bench.enter(each.name)
        curves[each.name] = read_curve(bench.store, each.name, options.iterations)
    seeds = [curve for name, curve in curves.items() if name.startswith("learning_seed_")]
    reached = [curve for curve in seeds if curve.reached(TARGET_POINTS) is not None]
    metrics = {
        "share_of_seeds_at_target": len(reached) / len(seeds),
        "median_gain": sorted(curve.best_gain for curve in seeds)[len(seeds) // 2],
        "worst_gain": min(curve.best_gain for curve in seeds),
    }
    for control in CONTROLS if options.controls else ():
        metrics[f"final_gain_{control}"] = curves[f"learning_{control}"].final_gain
        metrics[f"best_gain_{control}"] = curves[f"learning_{control}"].best_gain
    return Result(metrics, [curve.row(TARGET_POINTS) for curve in curves.values()], [f"kept in {bench.root}"])


def _experiments(bench: Workbench, options: LearningOptions) -> list[Experiment]:
    source = experiments_folder() / f"{options.experiment}.yaml"
    threads = 1 if options.jobs > 1 else 0
    shared = [*options.set.split(), f"trainer.launcher.threads={threads}", "promotion.on_refusal=retry_from_live"]
    found = [
        bench.add_experiment(source, f"learning_seed_{seed}", [*shared, f"seed={seed}"])
        for seed in range(options.seeds)
    ]
    if options.controls:
        found += [
            bench.add_experiment(source, f"learning_{name}", [*shared, "seed=0", override])
            for name, override in CONTROLS.items()
        ]
    return found


def _run_all(bench: Workbench, runs: list[Experiment], options: LearningOptions) -> None:
    """Bring every experiment to its iterations, showing how far each is."""
    children = Children()
    with Bars() as bars, ThreadPoolExecutor(options.jobs) as pool:
        try:
            # the first alone: what all share (task suite, the first base policy) is made once
            for group in (runs[:1], runs[1:]):
                waiting = {pool.submit(_iterate, children, bench, each, options) for each in group}
                while waiting:
                    ended, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
                    for each in group:
                        done = len(partitions(bench.store, each.name, "sampler"))
                        bars(Progress(each.name, None, "iterations", min(done, options.iterations), options.iterations))
                    for future in ended:
                        future.result()
        except BaseException:
            children.stop()
            raise


def _iterate(children: Children, bench: Workbench, experiment: Experiment, options: LearningOptions) -> None:
    """Bring an experiment to its iterations in a child process, as a user would. Raises TriplaneError with the log's name."""
    log = bench.root / "logs" / f"{experiment.name}.log"
    command = [sys.executable, "-m", "triplane_dagster.cli", "demo", "-e", experiment.name, "--json"]
    command += ["--set", f"iterations={options.iterations}"]
    environment = bench.environment(experiment.name)
    if options.jobs > 1:
        environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
    code = children.run(command, environment, log)
    if code:
        tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
        raise TriplaneError(
            f"{experiment.name} ended with code {code} ({''.join(tail)[:300]}): see {log}, then run this again"
        )
