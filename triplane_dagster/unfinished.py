"""Find runs of an experiment that have not ended, whoever launched them."""

from __future__ import annotations

import dagster as dg

from resources.errors import ExperimentBusy
from triplane_dagster.jobs import EXPERIMENT_TAG

_UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def unfinished_run(instance: dg.DagsterInstance, experiment: str) -> dg.DagsterRun | None:
    """A run of this experiment that waits or runs, or None.

    Runs from an asset's page and backfills have no tags of ours; they are known by the pool of their assets.
    """
    for run in instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED)):
        pools = run.run_op_concurrency.all_pools if run.run_op_concurrency else None
        if run.tags.get(EXPERIMENT_TAG) == experiment or experiment in (pools or ()):
            return run
    return None


def require_idle(instance: dg.DagsterInstance, experiment: str) -> None:
    """Raise ExperimentBusy, which names the run, if a run of this experiment waits or runs."""
    run = unfinished_run(instance, experiment)
    if run is None:
        return
    partition = f" of {run.tags['dagster/partition']}" if "dagster/partition" in run.tags else ""
    raise ExperimentBusy(
        f"run {run.run_id}{partition} of {experiment} has not ended ({run.status.value.lower()}): wait for it, or"
        f" terminate it in `triplane ui` (Runs; force termination if its process is gone), then run the same command"
        f" again"
    )
