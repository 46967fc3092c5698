"""Jobs of an experiment: its base, one iteration, and a rollback."""

import math
from collections.abc import Callable
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from assets.naming import key_of
from ops.deploy import servers_line
from ops.graph import LEARNED, ONCE, PER_ITERATION, SAMPLED
from ops.pod_tags import EXPERIMENT_LABEL, pod_tags
from ops.retries import bounded, step_retries
from ops.rollback import bring_live, observation, roll_back_once
from resources.errors import AlreadyLive
from resources.experiment import Experiment
from resources.store import StoreResource
from triplane_dagster.private_dagster import UnresolvedAssetJobDefinition

EXPERIMENT_TAG = EXPERIMENT_LABEL
EXCLUSIVE_TAG = "triplane/exclusive"
"""Experiment that no other run with this tag may run for: deploy/dagster-production.yaml limits them. The two halves of
iterations lack it, since they run side by side; their pools limit each.
"""
MAX_RETRIES_TAG = "dagster/max_retries"
"""Maximum relaunches of a run whose worker died, if `run_retries` is enabled in the Dagster instance."""
TARGET_TAG = "triplane/target"
"""Id of the run that asked for the iterations to which the tagged run belongs; see `sensors`."""
REPEATED_WHOLE = {"dagster/retry_strategy": "ALL_STEPS"}
"""Tag: re-execution from the failed step can succeed with mapped steps missing; committed work is skipped anyway."""
HALF_TAG = "triplane/half"
"""Half of an iteration that a run makes, for an experiment with overlap."""
Half = Literal["sample", "learn"]


def base_job_name(experiment: Experiment) -> str:
    """Name of the base job, e.g. quickstart_base."""
    return f"{experiment.name}_base"


def iteration_job_name(experiment: Experiment) -> str:
    """Name of the iteration job, e.g. quickstart_iteration."""
    return f"{experiment.name}_iteration"


def half_job_name(experiment: Experiment, half: Half) -> str:
    """Name of a job of an experiment with overlap, e.g. quickstart_sample."""
    return f"{experiment.name}_{half}"


def rollback_job_name(experiment: Experiment) -> str:
    """Name of the rollback job, e.g. quickstart_rollback."""
    return f"{experiment.name}_rollback"


def shared_tags(experiment: Experiment) -> dict[str, Any]:
    """Tags of every job of an experiment."""
    return {**REPEATED_WHOLE, EXPERIMENT_TAG: experiment.name, **pod_tags(experiment)}


def exclusive_tags(experiment: Experiment) -> dict[str, Any]:
    """Tags of a job that runs alone."""
    return {**shared_tags(experiment), EXCLUSIVE_TAG: experiment.name}


def base_job(experiment: Experiment) -> UnresolvedAssetJobDefinition:
    """Job that makes task suite and base policy."""
    return dg.define_asset_job(
        base_job_name(experiment),
        selection=dg.AssetSelection.assets(*(key_of(experiment, asset) for asset in ONCE)),
        description=f"{experiment.name}: task suite and base policy.",
        tags=exclusive_tags(experiment),
    )


def iteration_job(experiment: Experiment) -> UnresolvedAssetJobDefinition:
    """Job that makes one iteration, from pinned inputs to the decision."""
    return dg.define_asset_job(
        iteration_job_name(experiment),
        selection=dg.AssetSelection.assets(*(key_of(experiment, asset) for asset in PER_ITERATION)),
        description=f"{experiment.name}: one iteration, from pinned inputs to the decision.",
        tags=exclusive_tags(experiment),
    )


def half_jobs(experiment: Experiment) -> list[UnresolvedAssetJobDefinition]:
    """Jobs that make the two halves of an iteration, so that one iteration samples while another trains."""
    halves: dict[Half, tuple[tuple[str, ...], str]] = {
        "sample": (SAMPLED, "the first half of an iteration, from pinned inputs to the dataset"),
        "learn": (LEARNED, "the second half of an iteration, from training to the report"),
    }
    return [
        dg.define_asset_job(
            half_job_name(experiment, half),
            selection=dg.AssetSelection.assets(*(key_of(experiment, asset) for asset in assets)),
            description=f"{experiment.name}: {text}.",
            tags={**shared_tags(experiment), HALF_TAG: half},
        )
        for half, (assets, text) in halves.items()
    ]


def job_op(experiment: Experiment | None, name: str) -> Callable[[Callable[..., None]], dg.OpDefinition]:
    """Decorator of the only op of a job: it is placed as the experiment's steps are, and retried as `bounded` says.

    experiment: None for a job of none, which is placed as runs are.
    """

    def made(function: Callable[..., None]) -> dg.OpDefinition:
        op = dg.op(
            name=name,
            out=dg.Out(dg.Nothing),
            tags=pod_tags(experiment) if experiment else {},
            retry_policy=step_retries(),
        )
        return op(bounded(function))

    return made


def launched_unix(context: dg.OpExecutionContext) -> float:
    """Launch time of the run, or of the run that it retries, in seconds since 1970."""
    record = context.instance.get_run_record_by_id(context.run.get_root_run_id() or context.run_id)
    return record.create_timestamp.timestamp() if record else math.inf


class RollBackTo(dg.Config):
    """Run configuration of a rollback."""

    to: str = Field(
        default="",
        description=(
            "base, the number of a change, or the beginning of the digest of a policy that was live;"
            " empty: the policy before the one that is live at the launch."
        ),
    )
    reason: str = Field(description="Reason, in a few words. Recorded in the registry.")


def rollback_job(experiment: Experiment) -> dg.JobDefinition:
    """Job that makes an earlier policy live again; it appears as an observation on the page of sampler."""

    @job_op(experiment, f"{experiment.name}_roll_back")
    def roll_back_op(context: dg.OpExecutionContext, config: RollBackTo, store: StoreResource) -> None:
        opened, request = store.open(), context.run.get_root_run_id() or context.run_id
        try:
            done = roll_back_once(opened, experiment, config.to or None, config.reason, request, launched_unix(context))
        except AlreadyLive as error:
            context.log.info(f"{error}; {servers_line(bring_live(opened, experiment))}")
            return
        how = "was rolled back to before, by this same run" if done.before else "is live"
        context.log.info(f"{done.entry.policy.short} {how}: {done.entry.came_by}; {servers_line(done.servers)}")
        context.log_event(observation(experiment.name, done))

    @dg.job(
        name=rollback_job_name(experiment),
        description=(
            f"{experiment.name}: make an earlier policy live again. Adds a change to the registry; nothing is deleted."
        ),
        # no relaunch after a crash: "the previous policy" could be another one by then; an operator has to ask again
        tags={**exclusive_tags(experiment), MAX_RETRIES_TAG: "0"},
    )
    def job() -> None:
        roll_back_op()

    return job
