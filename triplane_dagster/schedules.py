"""Schedule of nightly training, one iteration each; stopped by default."""

from __future__ import annotations

import dagster as dg

from contracts.store import open_store
from resources.experiment import Experiment
from triplane_dagster.iterations import next_partition
from triplane_dagster.private_dagster import UnresolvedAssetJobDefinition


def nightly(experiment: Experiment, job: UnresolvedAssetJobDefinition) -> dg.ScheduleDefinition:
    """Add the next iteration and run it, at 02:00 UTC."""

    @dg.schedule(
        name=f"{experiment.name}_nightly",
        job=job,
        cron_schedule="0 2 * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"{experiment.name}: one iteration per night.",
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        iteration = next_partition(open_store(), experiment)
        context.instance.add_dynamic_partitions(experiment.name, [iteration])
        night = context.scheduled_execution_time.date().isoformat()
        return dg.RunRequest(run_key=f"{iteration}-{night}", partition_key=iteration)

    return schedule
