"""Job `NAME_train`: ask for iterations, which the sensor `NAME_sequence` then runs one by one."""

from datetime import datetime

import dagster as dg
from pydantic import Field

from resources.errors import TargetRefused
from resources.experiment import Experiment
from resources.store import StoreResource
from resources.training_launcher import require_launchable
from triplane_dagster.jobs import exclusive_tags, job_op, launched_unix
from triplane_dagster.lost_retries import RETRY_TAG
from triplane_dagster.targets import end_target, request_target, unfinished_target

NIGHT_TAG = "triplane/night"
"""Date of the night whose schedule launched the run."""
SCHEDULED_TAG = "triplane/scheduled"
"""Time for which that night was scheduled, as ISO 8601."""


class Training(dg.Config):
    """Run configuration of `NAME_train`."""

    iterations: int = Field(
        default=1, ge=0, le=9999, description="Number of further iterations. 0 ends the request that is under way."
    )
    from_policy: str = Field(
        default="live",
        min_length=1,
        description=(
            "Policy that the first iteration starts from: live, base, or the beginning of a checkpoint's digest. Later"
            " ones start from the live policy."
        ),
    )
    reason: str = Field(default="by hand", description="Reason, in a few words. Recorded in the store.")
    max_hours: float | None = Field(
        default=None,
        gt=0,
        le=8760,
        description=(
            "Begin no further iteration after this time, in hours from the launch, of a night from its scheduled time;"
            " none: no limit."
        ),
    )


def train_job_name(experiment: Experiment) -> str:
    """Name of the training job, e.g. quickstart_train."""
    return f"{experiment.name}_train"


def train_op_name(experiment: Experiment) -> str:
    """Name of the only op of the training job."""
    return f"{experiment.name}_request"


def train_config(experiment: Experiment, training: Training) -> dg.RunConfig:
    """Run configuration of the training job."""
    return dg.RunConfig(ops={train_op_name(experiment): training})


def _began_unix(context: dg.OpExecutionContext) -> float:
    """Scheduled time of a nightly run, or launch time of a manual one, before any queue; in seconds since 1970."""
    scheduled = context.run.tags.get(SCHEDULED_TAG)
    return datetime.fromisoformat(scheduled).timestamp() if scheduled else launched_unix(context)


def _require_sequence(context: dg.OpExecutionContext, experiment: Experiment) -> None:
    """Raise TargetRefused if somebody has stopped the sensor that runs the iterations."""
    instance, origin, sensor = context.instance, context.run.remote_job_origin, f"{experiment.name}_sequence"
    ours = origin.repository_origin.get_selector_id() if origin else None  # a renamed code location leaves its states
    states = instance.all_instigator_state(repository_selector_id=ours) if instance.schedule_storage else ()
    if any(each.name == sensor and each.status.value == "STOPPED" for each in states):
        raise TargetRefused(
            f"the sensor {sensor}, which runs the iterations, is stopped: start it in the UI (Automation), then launch"
            f" {train_job_name(experiment)} again"
        )


def train_job(experiment: Experiment) -> dg.JobDefinition:
    """Job that asks for iterations."""

    @job_op(experiment, train_op_name(experiment))
    def request_op(context: dg.OpExecutionContext, config: Training, store: StoreResource) -> None:
        opened = store.open()
        if config.iterations == 0:
            unfinished = unfinished_target(opened, experiment)
            if unfinished is None or (unfinished.asked_unix or 0.0) > launched_unix(context):
                # a repetition of a killed run, after which other iterations were asked for, leaves those alone
                context.log.info(f"asked for later: {unfinished}" if unfinished else "nothing was under way")
                return
            end_target(opened, experiment, unfinished, f"ended by hand ({config.reason})", by_hand=True)
            context.log.info(f"ended: {unfinished}")
            return
        require_launchable(experiment)
        repeats = context.run.get_root_run_id() is not None
        if not repeats:
            _require_sequence(context, experiment)
        target = request_target(
            opened,
            experiment,
            config.iterations,
            request=context.run.get_root_run_id() or context.run_id,
            from_policy=config.from_policy,
            reason=config.reason,
            deadline_unix=None if config.max_hours is None else _began_unix(context) + 3600 * config.max_hours,
            night=context.run.tags.get(NIGHT_TAG),
            asked_unix=launched_unix(context),
            repeats=repeats,
        )
        if repeats and unfinished_target(opened, experiment) != target:
            over = (
                f"{target} {'was' if target.count == 1 else 'were'} asked for by the run that this one repeats, and"
                f" ended ({target.ended or 'another request followed'}): launch {train_job_name(experiment)} anew for"
                " more"
            )
            if RETRY_TAG not in context.run.tags:  # a person repeats it, and not Dagster after a kill
                raise TargetRefused(f"{experiment.name}: {over}")
            context.log.info(over)
            return
        context.log.info(f"{experiment.name}_sequence runs {target}, one at a time")

    @dg.job(
        name=train_job_name(experiment),
        description=f"{experiment.name}: ask for further iterations; {experiment.name}_sequence runs them.",
        # a run whose process is killed is launched again: one launch is one request, however often it is repeated
        tags=exclusive_tags(experiment),
        config=train_config(experiment, Training(iterations=experiment.iterations)),
    )
    def job() -> None:
        request_op()

    return job
