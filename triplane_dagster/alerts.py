"""Tell somebody about failed runs: one JSON message to $TRIPLANE_ALERT_WEBHOOK each."""

from __future__ import annotations

import os
from typing import Any

import dagster as dg
import httpx

from triplane_dagster.jobs import EXPERIMENT_TAG

VARIABLE = "TRIPLANE_ALERT_WEBHOOK"
TIMEOUT_S = 10.0
"""Time for the only attempt, in seconds: a sensor's tick must end within a minute."""
_MAX_TEXT = 2000


@dg.run_failure_sensor(
    name="alert_on_failure",
    default_status=dg.DefaultSensorStatus.RUNNING,
    monitor_all_code_locations=False,
    description=f"Posts each failed run as JSON to the URL in ${VARIABLE}.",
)
def alert_on_failure(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
    """Post a failed run. An error of the receiver is logged, without the URL, which may hold a secret."""
    url = os.environ.get(VARIABLE)
    if not url:
        return dg.SkipReason(f"{VARIABLE} is not set")
    try:
        httpx.post(url, json=message(context), timeout=TIMEOUT_S).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else type(error).__name__
        context.log.warning(
            f"run {context.dagster_run.run_id} failed, and ${VARIABLE} did not take the message: {status}"
        )
    return None


def message(context: dg.RunFailureSensorContext) -> dict[str, Any]:
    """The posted JSON object; `text` is what chat services show."""
    run = context.dagster_run
    errors = [event.step_failure_data.error for event in context.get_step_failure_events()]
    causes = [(error.cause or error).message for error in errors if error is not None]
    error = " ".join((causes[0] if causes else context.failure_event.message or "").split())[:_MAX_TEXT]
    partition = run.tags.get("dagster/partition")
    return {
        "text": f"{run.job_name}{f' {partition}' if partition else ''} failed: {error}",
        "job": run.job_name,
        "experiment": run.tags.get(EXPERIMENT_TAG),
        "partition": partition,
        "run_id": run.run_id,
        "error": error,
    }
