"""Find runs whose process was killed: Dagster shows them as running and counts them against the run limit."""

from __future__ import annotations

import os
import socket

import dagster as dg

from contracts.processes import boot_id, start_of

PROCESS_TAG = "triplane/process"
"""Tag with the process that executes a run, and the run: host, boot, pid, start, run id. Dagster copies the tags of a
run to its repetition, which another process executes.
"""

_UNFINISHED = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def process_name(pid: int) -> str | None:
    """Identifier of a process on this machine that stays unique when its pid is reused; None if it is gone."""
    boot, started = boot_id(), start_of(pid)
    return None if boot is None or started is None else f"{socket.gethostname()}/{boot}/{pid}/{started}"


def process_tag(run_id: str) -> dict[str, str]:
    """Tag of a run that this process executes."""
    name = process_name(os.getpid())
    return {} if name is None else {PROCESS_TAG: f"{name}/{run_id}"}


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """End unfinished runs whose process died on this machine. Returns their ids.

    A run of the UI is marked as failed, so that `run_retries` launches it again. A run of the command line is marked as
    canceled, since whoever gave the command repeats it, and so is one that somebody was terminating.
    """
    here = process_name(os.getpid())
    ended = []
    for run in instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED)):
        name, _, executed = run.tags.get(PROCESS_TAG, "").rpartition("/")
        if here is None or executed != run.run_id or name.split("/")[0] != here.split("/")[0]:
            continue
        if process_name(int(name.split("/")[2])) != name:
            why = "The process died. Committed work is kept; the next run continues from it."
            if run.remote_job_origin is None or run.status is dg.DagsterRunStatus.CANCELING:
                instance.report_run_canceled(run, why)
            else:
                instance.report_run_failed(run, why)
            ended.append(run.run_id)
    return ended
