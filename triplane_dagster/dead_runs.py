"""Find runs whose process was killed: Dagster shows them as running and counts them against the run limit."""

from __future__ import annotations

import os
import socket

import dagster as dg

from contracts.processes import boot_id, start_of

PROCESS_TAG = "triplane/process"
"""Tag with the process that executes an in-process run: host, boot, pid, start."""

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


def cancel_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark unfinished runs as canceled if their process died on this machine. Returns their ids."""
    here = process_name(os.getpid())
    canceled = []
    for run in instance.get_runs(dg.RunsFilter(statuses=_UNFINISHED)):
        name = run.tags.get(PROCESS_TAG)
        if here is None or name is None or name.split("/")[0] != here.split("/")[0]:
            continue
        if process_name(int(name.split("/")[2])) != name:
            instance.report_run_canceled(
                run, "The process died. Committed work is kept; the next run continues from it."
            )
            canceled.append(run.run_id)
    return canceled
