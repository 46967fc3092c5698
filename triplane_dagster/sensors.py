"""Request the iterations of a target one by one: target + registry + status of runs -> the next run, or why none.

Nothing is kept between ticks, so an edited tag, a lost tick or a restart loses no iteration and repeats none.
"""

from __future__ import annotations

import time

import dagster as dg

from assets.naming import key_of, partitions_of
from contracts.store import Store, open_store
from ops.graph import ONCE
from ops.iteration_keys import iteration_key, next_iteration
from resources.experiment import Experiment
from resources.refs import has_ref
from triplane_dagster.iterations import decision_of, is_complete, may_continue
from triplane_dagster.jobs import EXPERIMENT_TAG, TARGET_TAG, base_job_name, iteration_job_name
from triplane_dagster.pools import limit_pools
from triplane_dagster.private_dagster import UnresolvedAssetJobDefinition
from triplane_dagster.targets import Target, end_target, last_target
from triplane_dagster.unfinished import unfinished_run

_PARTITION_TAG = "dagster/partition"


def continue_sequence(
    experiment: Experiment, base: UnresolvedAssetJobDefinition, job: UnresolvedAssetJobDefinition
) -> dg.SensorDefinition:
    """Sensor that requests the next run of the target that `NAME_train` set."""

    @dg.sensor(
        name=f"{experiment.name}_sequence",
        jobs=[base, job],
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=10,
        description=f"{experiment.name}: runs the iterations that {experiment.name}_train asked for, one at a time.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        limit_pools(context.instance, [experiment.name])
        return next_request(context.instance, open_store(), experiment)

    return sensor


def next_request(instance: dg.DagsterInstance, store: Store, experiment: Experiment) -> dg.SensorResult | dg.SkipReason:
    """Request for the next run of the unfinished target, or why there is none. Records the end of a target.

    The number of its requests to the store does not depend on the number of iterations.
    """
    target = last_target(store, experiment)
    if target is None or target.done:
        ended = f"; the last one ({target}) ended: {target.ended or 'its command finished it'}" if target else ""
        return dg.SkipReason(f"no iterations are asked for, launch {experiment.name}_train{ended}")
    if target.by == "command":
        return dg.SkipReason(f"`triplane iterate` was asked for iterations {target} and runs them itself")
    busy = unfinished_run(instance, experiment.name)
    if busy is not None:
        return dg.SkipReason(f"run {busy.run_id} has not ended ({busy.status.value.lower()})")
    number = _undone(store, experiment, target)
    why = _ending(store, experiment, target, number)
    if why:
        end_target(store, experiment, target, why)
        return dg.SkipReason(f"iterations {target} ended: {why}")
    if not all(has_ref(store, experiment.name, asset) for asset in ONCE):
        return _request(instance, experiment, target, None)
    return _request(instance, experiment, target, number)


def _undone(store: Store, experiment: Experiment, target: Target) -> int:
    """First iteration of the target without decision or without report."""
    number = next_iteration(store, experiment.name)
    before = number - 1
    return before if before >= target.first and not is_complete(store, experiment, iteration_key(before)) else number


def _ending(store: Store, experiment: Experiment, target: Target, number: int) -> str:
    """Why no iteration follows; empty: `number` follows."""
    if number > target.first and not may_continue(store, experiment, iteration_key(number - 1)):
        decision = decision_of(store, experiment, iteration_key(number - 1))
        said = decision.decision if decision else "undecided"
        return f"iteration {iteration_key(number - 1)} is {said} and promotion.on_refusal is stop"
    if number > target.last:
        return "all of them were made"
    if target.deadline_unix is not None and time.time() >= target.deadline_unix:
        return f"its time is over, {iteration_key(number)} and later ones were not begun"
    return ""


def _request(
    instance: dg.DagsterInstance, experiment: Experiment, target: Target, number: int | None
) -> dg.SensorResult | dg.SkipReason:
    """Request for the run of an iteration, or of the base if number is None, unless it ran in vain."""
    job = base_job_name(experiment) if number is None else iteration_job_name(experiment)
    key = None if number is None else iteration_key(number)
    tags = {TARGET_TAG: target.request or "", EXPERIMENT_TAG: experiment.name}
    place = {} if key is None else {_PARTITION_TAG: key}
    for run in instance.get_runs(dg.RunsFilter(job_name=job, tags={**tags, **place}), limit=1):
        return dg.SkipReason(
            f"run {run.run_id} of {key or 'the base'} ended as {run.status.value.lower()}: correct the cause and"
            f" re-execute it; {'the sequence' if key is None else f'once {key} has a decision the sequence'} continues"
        )
    config = {}
    if number == target.first:
        step = key_of(experiment, "iteration_inputs").to_python_identifier()
        config = {"ops": {step: {"config": {"policy": target.from_policy}}}}
    request = dg.RunRequest(
        run_key=f"{target.request}/{key or 'base'}", job_name=job, partition_key=key, run_config=config, tags=tags
    )
    added = [partitions_of(experiment).build_add_request([key])] if key else []
    return dg.SensorResult(run_requests=[request], dynamic_partitions_requests=added)
