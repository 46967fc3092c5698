"""Run K iterations in sequence through the daemon: a run tagged `triplane/remaining=K` is followed by one tagged
K-1.
"""

from __future__ import annotations

import dagster as dg

from contracts.store import open_store
from resources.experiment import Experiment
from triplane_dagster.iterations import may_continue, next_partition
from triplane_dagster.jobs import EXPERIMENT_TAG, REMAINING_TAG
from triplane_dagster.private_dagster import UnresolvedAssetJobDefinition


def continue_sequence(experiment: Experiment, job: UnresolvedAssetJobDefinition) -> dg.SensorDefinition:
    """Request the next iteration after a successful one, if some remain."""

    @dg.run_status_sensor(
        run_status=dg.DagsterRunStatus.SUCCESS,
        name=f"{experiment.name}_sequence",
        monitored_jobs=[job],
        request_job=job,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=10,
        description=f"{experiment.name}: continues while the tag {REMAINING_TAG} is above 0.",
    )
    def sensor(context: dg.RunStatusSensorContext) -> dg.RunRequest | dg.SkipReason:
        return next_request(context, experiment)

    return sensor


def next_request(context: dg.RunStatusSensorContext, experiment: Experiment) -> dg.RunRequest | dg.SkipReason:
    """Request for the run after a successful one."""
    run = context.dagster_run
    remaining = run.tags.get(REMAINING_TAG, "0")
    if not remaining.isdecimal() or int(remaining) < 1:
        return dg.SkipReason(f"nothing remains after run {run.run_id[:8]}")
    store = open_store()
    done = run.tags.get("dagster/partition", "")
    if not may_continue(store, experiment, done):
        return dg.SkipReason(f"candidate of iteration {done} did not go live and promotion.on_refusal is stop")
    iteration = next_partition(store, experiment)
    context.instance.add_dynamic_partitions(experiment.name, [iteration])
    tags = {REMAINING_TAG: str(int(remaining) - 1), EXPERIMENT_TAG: experiment.name}
    return dg.RunRequest(run_key=f"{run.run_id}-next", job_name=run.job_name, partition_key=iteration, tags=tags)
