"""Retries of runs that Dagster's daemon gave up because the code server was unreachable, for example after a node drain
that evicted the run's pod and the code server. The daemon tries to launch a retry once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

FAILED = "Failed to retry run"
"""Message of Dagster's event for a retry that it could not launch."""
ATTEMPTS = 5
WILL_RETRY_TAG = "dagster/will_retry"
"""Set by Dagster on a failed run: whether `run_retries` launches it again."""
_RETRIED_TAG = "dagster/auto_retry_run_id"
"""Set by Dagster on a failed run that it has launched again."""
PARENT_TAG, RETRY_TAG = "dagster/parent_run_id", "dagster/retry_number"
_RECENT = timedelta(hours=1)


def awaits_retry(instance: dg.DagsterInstance, tags: dict[str, str]) -> bool:
    """Whether a run with these tags failed within the last hour, and Dagster has yet to launch it again."""
    failed = _failed(instance, {**tags, WILL_RETRY_TAG: "true"})
    return any(_RETRIED_TAG not in run.tags for run in failed)


def fail_again(instance: dg.DagsterInstance) -> list[str]:
    """Report the failure event of such runs again, which makes the daemon retry them. Returns their ids.

    Leaves out runs that somebody has re-executed, that failed more than an hour ago, or after ATTEMPTS attempts.
    """
    lost = [run for run in _failed(instance, {WILL_RETRY_TAG: "false"}) if _is_lost(instance, run)]
    for run in lost:
        instance.report_run_failed(run, "Dagster could not launch the run again then, and tries once more.")
    return [run.run_id for run in lost]


def _failed(instance: dg.DagsterInstance, tags: dict[str, str]) -> Sequence[dg.DagsterRun]:
    recent = datetime.now(UTC) - _RECENT
    return instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE], tags=tags, updated_after=recent))


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
    # the daemon may have created the retry without submitting it; it then submits that one
    again = instance.get_runs(dg.RunsFilter(tags={PARENT_TAG: run.run_id}))
    return all(each.status is dg.DagsterRunStatus.NOT_STARTED and RETRY_TAG in each.tags for each in again)
