"""Find runs of an experiment that have not ended, whoever launched them."""

from __future__ import annotations

import dagster as dg

from ops.graph import PER_ITERATION, pool_of
from resources.errors import ExperimentBusy
from resources.experiment import Experiment
from triplane_dagster.jobs import EXPERIMENT_TAG, HALF_TAG, Half

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def unfinished_run(
    instance: dg.DagsterInstance, experiment: Experiment, half: Half | None = None
) -> dg.DagsterRun | None:
    """A run of this experiment that waits or runs, or None. half: leave out runs of the other half.

    Runs from an asset's page and backfills have no tags of ours; they are known by the pools of their assets.
    """
    ours = {pool_of(experiment, asset) for asset in PER_ITERATION}
    for run in instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED)):
        if half is not None and run.tags.get(HALF_TAG, half) != half:
            continue
        pools = run.run_op_concurrency.all_pools if run.run_op_concurrency else None
        if run.tags.get(EXPERIMENT_TAG) == experiment.name or ours & set(pools or ()):
            return run
    return None


def require_idle(instance: dg.DagsterInstance, experiment: Experiment, half: Half | None = None) -> None:
    """Raise ExperimentBusy, which names the run, if a run of this experiment waits or runs. half: see
    `unfinished_run`.
    """
    run = unfinished_run(instance, experiment, half)
    if run is None:
        return
    partition = f" of {run.tags['dagster/partition']}" if "dagster/partition" in run.tags else ""
    raise ExperimentBusy(
        f"run {run.run_id}{partition} of {experiment.name} has not ended ({run.status.value.lower()}): wait for it, or"
        f" terminate it in `triplane ui` (Runs; force termination if its process is gone), then run the same command"
        f" again"
    )
