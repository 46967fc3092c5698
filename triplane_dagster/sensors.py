"""Request the iterations of a target one by one: target + registry + status of runs -> the next run, or why none. With
overlap: the next run that learns, and the next that samples.

Nothing is kept between ticks, so an edited tag, a lost tick or a restart loses no iteration and repeats none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import dagster as dg

from assets.naming import key_of, partitions_of
from contracts.store import Store, open_store
from ops.graph import DATASET, ITERATION_INPUTS, ONCE
from ops.iteration_keys import iteration_key, next_iteration
from resources.experiment import Experiment
from resources.refs import has_ref
from triplane_dagster.dead_runs import end_dead_runs
from triplane_dagster.experiment_files import why_missing
from triplane_dagster.iterations import decision_of, is_complete, may_continue
from triplane_dagster.jobs import (
    EXPERIMENT_TAG,
    TARGET_TAG,
    Half,
    base_job_name,
    half_job_name,
    iteration_job_name,
)
from triplane_dagster.lost_retries import awaits_retry, fail_again
from triplane_dagster.pools import limit_pools
from triplane_dagster.private_dagster import UnresolvedAssetJobDefinition
from triplane_dagster.targets import Target, end_target, last_target
from triplane_dagster.unfinished import unfinished_run

_PARTITION_TAG = "dagster/partition"


def continue_sequence(experiment: Experiment, jobs: Sequence[UnresolvedAssetJobDefinition]) -> dg.SensorDefinition:
    """Sensor that requests the next run of the target that `NAME_train` set. jobs: all that it may request."""

    @dg.sensor(
        name=f"{experiment.name}_sequence",
        jobs=jobs,
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=10,
        description=f"{experiment.name}: runs the iterations that {experiment.name}_train asked for, one at a time.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        limit_pools(context.instance, [experiment])
        end_dead_runs(context.instance)
        fail_again(context.instance)
        found = next_request(context.instance, open_store(), experiment)
        fault = why_missing(experiment.name) if isinstance(found, dg.SensorResult) else ""
        return dg.SkipReason(fault) if fault else found

    return sensor


def next_request(instance: dg.DagsterInstance, store: Store, experiment: Experiment) -> dg.SensorResult | dg.SkipReason:
    """Request for the next run of the unfinished target, or why there is none. Records the end of a target.

    The number of its requests to the store does not depend on the number of iterations.
    """
    target = last_target(store, experiment)
    if target is None or target.done:
        ended = f"; the last request, {target}, ended: {target.ended or 'its command finished it'}" if target else ""
        return dg.SkipReason(f"no iterations are asked for, launch {experiment.name}_train{ended}")
    if target.by == "command":
        return dg.SkipReason(f"`triplane iterate` was asked for {target} and runs them itself")
    if not experiment.off_policy.overlap:
        busy = unfinished_run(instance, experiment)
        if busy is not None:
            return dg.SkipReason(_not_ended(busy))
    number = _undone(store, experiment, target)
    why = _ending(store, experiment, target, number)
    if why:
        end_target(store, experiment, target, why)
        return dg.SkipReason(f"{target} ended: {why}")
    late = target.deadline_unix is not None and time.time() >= target.deadline_unix
    has_base = all(has_ref(store, experiment.name, asset) for asset in ONCE)
    asked: list[dg.RunRequest | str] = []
    if has_base and experiment.off_policy.overlap:
        asked = list(_halves(instance, store, experiment, target, number, late))
    elif has_base and not late:
        asked = [_request(instance, experiment, target, number, iteration_job_name(experiment))]
    elif not late:
        asked = [_request(instance, experiment, target, None, base_job_name(experiment))]
    requests = [each for each in asked if isinstance(each, dg.RunRequest)]
    said = "; ".join(each for each in asked if isinstance(each, str))
    if late and not requests and unfinished_run(instance, experiment) is None:
        if awaits_retry(instance, {TARGET_TAG: target.request or ""}):
            return dg.SkipReason("its time is over, and Dagster is about to launch a failed run again")
        why = f"its time is over, {said or f'{iteration_key(number)} and later ones were not begun'}"
        end_target(store, experiment, target, why)
        return dg.SkipReason(f"{target} ended: {why}")
    if not requests:
        return dg.SkipReason(said or "its time is over, and a run has not ended")
    keys = [key for key in dict.fromkeys(each.partition_key for each in requests) if key]
    added = [partitions_of(experiment).build_add_request(keys)] if keys else []
    return dg.SensorResult(run_requests=requests, dynamic_partitions_requests=added)


def _halves(
    instance: dg.DagsterInstance, store: Store, experiment: Experiment, target: Target, number: int, late: bool
) -> Iterator[dg.RunRequest | str]:
    """The run that learns and the one that samples, or why there is none. number: the first unfinished iteration. late:
    only for iterations that have begun.
    """
    sampled = has_ref(store, experiment.name, DATASET.name, iteration_key(number))
    ahead = number + 1 if sampled else number
    if sampled:
        yield _half(instance, experiment, target, number, "learn")
    if ahead > target.last or (
        late and not has_ref(store, experiment.name, ITERATION_INPUTS.name, iteration_key(ahead))
    ):
        return
    if not has_ref(store, experiment.name, DATASET.name, iteration_key(ahead)):
        yield _half(instance, experiment, target, ahead, "sample")


def _half(
    instance: dg.DagsterInstance, experiment: Experiment, target: Target, number: int, half: Half
) -> dg.RunRequest | str:
    busy = unfinished_run(instance, experiment, half)
    if busy is not None:
        return _not_ended(busy)
    return _request(instance, experiment, target, number, half_job_name(experiment, half))


def _not_ended(run: dg.DagsterRun) -> str:
    return f"run {run.run_id} has not ended ({run.status.value.lower()})"


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
    return ""


def _request(
    instance: dg.DagsterInstance, experiment: Experiment, target: Target, number: int | None, job: str
) -> dg.RunRequest | str:
    """Request for the run of a job for an iteration, or for the base if number is None, unless it ran in vain."""
    key = None if number is None else iteration_key(number)
    tags = {TARGET_TAG: target.request or "", EXPERIMENT_TAG: experiment.name}
    place = {} if key is None else {_PARTITION_TAG: key}
    for run in instance.get_runs(dg.RunsFilter(job_name=job, tags={**tags, **place}), limit=1):
        if not run.is_finished:
            return _not_ended(run)
        if key is not None and not instance.has_dynamic_partition(experiment.name, key):
            instance.add_dynamic_partitions(experiment.name, [key])  # deleted meanwhile: every re-execution would fail
        return (
            f"run {run.run_id} of {key or 'the base'} ended as {run.status.value.lower()}: correct the cause and"
            f" re-execute it; {'the sequence' if key is None else f'once {key} has decision and report, the sequence'}"
            " continues"
        )
    config = {}
    if number == target.first and job != half_job_name(experiment, "learn"):
        step = key_of(experiment, "iteration_inputs").to_python_identifier()
        config = {"ops": {step: {"config": {"policy": target.from_policy}}}}
    half = job.removeprefix(f"{experiment.name}_") if experiment.off_policy.overlap else ""
    return dg.RunRequest(
        run_key="/".join(filter(None, [target.request, key or "base", half])),
        job_name=job,
        partition_key=key,
        run_config=config,
        tags=tags,
    )
