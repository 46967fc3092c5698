r"""Run iterations one after another for the command line.

base -> iteration 0000 -> iteration 0001 -> ...      one envd server and one engine for all of them

With overlap, another process samples (`ahead`): sample 0000 -> sample 0001 -> sample 0002 -> ...
                                                          \-> learn 0000 -> learn 0001 -> ...
"""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg

from contracts.store import open_store
from ops.difficulty import require_difficulty
from ops.readings import require_splits
from resources.experiment import Experiment
from resources.progress import ProgressSink, no_progress
from resources.training_launcher import require_launchable
from triplane_dagster import iterations
from triplane_dagster.ahead import Ahead, sampling_ahead
from triplane_dagster.run import Runner, open_runner
from triplane_dagster.targets import begin_target, end_target


def run_iterations(
    experiment: Experiment,
    count: int,
    instance: dg.DagsterInstance,
    progress: ProgressSink = no_progress,
    between: Callable[[], None] = lambda: None,
) -> list[str]:
    """Make the base assets, then `count` further iterations in sequence. Returns the partition keys with a decision.

    After a kill, the same call finishes the remaining iterations and adds none. Stops after a refusal if
    promotion.on_refusal is stop. Raises the error of a failing step. between: called after each run; may raise to stop.
    """
    require_launchable(experiment)
    store = open_store()
    require_difficulty(store, experiment)
    if experiment.fork is None:  # a fork has its source's suite, which is looked at when an iteration begins
        require_splits(store, experiment)
    with open_runner(experiment, instance, progress) as runner:
        runner.base()
        between()
        if count == 0:
            return []
        target = begin_target(store, experiment, count)
        made = []
        wanted = [each for each in target.iterations() if not iterations.is_complete(store, experiment, each)]
        with sampling_ahead(experiment, wanted, instance, progress) as ahead:
            for partition in target.iterations():
                if partition in wanted:
                    _iterate(runner, ahead, partition)
                    between()
                made.append(partition)
                if not iterations.may_continue(store, experiment, partition):
                    break
        end_target(store, experiment, target)
    return made


def _iterate(runner: Runner, ahead: Ahead | None, partition: str) -> None:
    if ahead is None:
        runner.iteration(partition)
        return
    ahead.wait_for(partition)
    runner.iteration(partition, half="learn")
