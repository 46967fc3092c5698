"""Runs of an experiment, each with its own seed and overrides, in child processes. The same command resumes them.

Workbench  ->  one experiment a run  ->  `triplane demo`, a few at a time  ->  curves
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from pydantic import Field

from benchmarks.processes import Children
from benchmarks.result import Options
from benchmarks.workbench import DEFAULT_FOLDER, Workbench
from contracts.errors import TriplaneError
from resources.experiment import Experiment
from resources.progress import Progress
from resources.refs import partitions
from triplane_dagster.cli.bars import Bars
from triplane_dagster.experiment_files import experiments_folder

POLL_S = 5.0
PERMUTED = "trainer.permute_rewards=true"
"""Override of a control: its rewards are permuted within each group, so that it must not learn."""
_SHARED = ("trainer.launcher.threads=1", "engine.threads=1", "promotion.on_refusal=retry_from_live")


class RunOptions(Options):
    """Options of a benchmark that runs experiments."""

    iterations: int = Field(3, ge=1, le=1000)
    """Iterations of each run and of each control."""
    jobs: int = Field(2, ge=1, le=64)
    """Concurrent experiments, of one thread each."""
    experiment: str = "quickstart"
    """The experiment to repeat."""
    work: str = DEFAULT_FOLDER
    """Folder that is kept and resumed."""
    set: str = ""
    """Further overrides, separated by blanks, e.g. "prompts.groups=16 tasks.train=64"."""


def add_run(bench: Workbench, options: RunOptions, name: str, seed: int, *overrides: str) -> Experiment:
    """Experiment `name` of the workbench. Runs of one seed share its base policy. Raises ExperimentError."""
    source = experiments_folder() / f"{options.experiment}.yaml"
    return bench.add_experiment(source, name, [*options.set.split(), *_SHARED, f"seed={seed}", *overrides])


def run_all(bench: Workbench, runs: Sequence[Experiment], options: RunOptions) -> None:
    """Run every experiment to its number of iterations, the first ones first, with progress bars.

    Raises TriplaneError if one fails; what it and the others committed stays.
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


def _iterate(children: Children, bench: Workbench, experiment: Experiment, options: RunOptions) -> None:
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
