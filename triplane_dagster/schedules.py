"""Schedule that asks for iterations every night; stopped by default."""

from __future__ import annotations

import time
from datetime import datetime

import dagster as dg

from contracts.store import Store, open_store
from ops.iteration_keys import iteration_key, next_iteration
from resources.experiment import Experiment, ScheduleConfig
from triplane_dagster.iterations import decision_of, may_continue
from triplane_dagster.targets import how_to_end, unfinished_target
from triplane_dagster.training_job import NIGHT_TAG, SCHEDULED_TAG, Training, train_config, train_job_name
from triplane_dagster.unfinished import unfinished_run


def nightly(experiment: Experiment, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """Ask for the iterations of a night, at the time that the experiment's `schedule` names."""
    plan = experiment.schedule or ScheduleConfig()

    @dg.schedule(
        name=f"{experiment.name}_nightly",
        job=job,
        cron_schedule=plan.cron,
        execution_timezone=plan.timezone,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=(
            f"{experiment.name}: asks for iterations every night ({plan.iterations}). A night is skipped while a"
            " request or a run is unfinished, and after a refusal if promotion.on_refusal is stop; its tick says why."
        ),
    )
    def schedule(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        return night_request(context.instance, open_store(), experiment, context.scheduled_execution_time)

    return schedule


def night_request(
    instance: dg.DagsterInstance, store: Store, experiment: Experiment, at: datetime
) -> dg.RunRequest | dg.SkipReason:
    """Request for the run of `NAME_train`, or why there is none tonight."""
    plan, train = experiment.schedule or ScheduleConfig(), train_job_name(experiment)
    # timestamps: adding hours to a local time ignores a change to summer time in between
    if plan.max_hours is not None and at.timestamp() + 3600 * plan.max_hours <= time.time():
        return dg.SkipReason(f"the night of {at.isoformat()} is over (schedule.max_hours={plan.max_hours:g})")
    target = unfinished_target(store, experiment)
    if target is not None:
        return dg.SkipReason(how_to_end(experiment, target))
    busy = unfinished_run(instance, experiment)
    if busy is not None:
        return dg.SkipReason(f"run {busy.run_id} has not ended ({busy.status.value.lower()})")
    last = next_iteration(store, experiment.name) - 1
    if last >= 0 and not may_continue(store, experiment, iteration_key(last)):
        decision = decision_of(store, experiment, iteration_key(last))
        said = decision.decision if decision else "undecided"
        return dg.SkipReason(
            f"iteration {iteration_key(last)} is {said} and promotion.on_refusal is stop: launch {train} by hand"
        )
    night = at.date().isoformat()
    training = Training(iterations=plan.iterations, reason=f"night of {night}", max_hours=plan.max_hours)
    tags = {NIGHT_TAG: night, SCHEDULED_TAG: at.isoformat()}
    return dg.RunRequest(run_key=at.isoformat(), run_config=train_config(experiment, training), tags=tags)
