"""Have Dagster launch a failed run again that it could not: the code server was away just then, as in a drain that took
both. Dagster's daemon tries once, and then never again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg

FAILED = "Failed to retry run"
"""Dagster's event of a run that should be launched again, and was not."""
ATTEMPTS = 5
WILL_RETRY_TAG, PARENT_TAG, RETRY_TAG = "dagster/will_retry", "dagster/parent_run_id", "dagster/retry_number"
_RECENT = timedelta(hours=1)


def fail_again(instance: dg.DagsterInstance) -> list[str]:
    """Report the failure of such runs once more: the daemon acts on that event alone. Returns their ids.

    Not for a run that somebody has re-executed since, that failed longer than an hour ago, or after five attempts.
    """
    given_up = dg.RunsFilter(
        statuses=[dg.DagsterRunStatus.FAILURE],
        tags={WILL_RETRY_TAG: "false"},
        updated_after=datetime.now(UTC) - _RECENT,
    )
    lost = [run for run in instance.get_runs(given_up) if _is_lost(instance, run)]
    for run in lost:
        instance.report_run_failed(run, "Dagster could not launch the run again then, and tries once more.")
    return [run.run_id for run in lost]


def _is_lost(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    types = {dg.DagsterEventType.ENGINE_EVENT, dg.DagsterEventType.RUN_FAILURE}
    events = [entry.get_dagster_event() for entry in instance.all_logs(run.run_id, of_type=types)]
    told = [
        event.event_type is dg.DagsterEventType.RUN_FAILURE
        for event in events
        if event.event_type is dg.DagsterEventType.RUN_FAILURE or event.message == FAILED
    ]
    if not told or told[-1] or told.count(False) >= ATTEMPTS:
        return False
    # the daemon may have made the repetition and not submitted it, which it then does
    again = instance.get_runs(dg.RunsFilter(tags={PARENT_TAG: run.run_id}))
    return all(each.status is dg.DagsterRunStatus.NOT_STARTED and RETRY_TAG in each.tags for each in again)
