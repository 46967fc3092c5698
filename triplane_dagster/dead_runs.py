"""Find runs whose process was killed: Dagster shows them as running and counts them against the run limit. Also end the
processes of runs that work on although Dagster shows them as ended, or no longer has them.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress

import dagster as dg

from contracts.processes import pid_space, start_of

PROCESS_TAG = "triplane/process"
"""Tag with the process that executes a run, and the run: host, boot:pid namespace, pid, start, run id. Dagster copies
the tags of a run to its repetition, which another process executes. Earlier versions wrote no pid namespace.
"""

TOLD_TAG = "triplane/told_to_end"
"""Tag of a run to whose process `end_dead_runs` has sent SIGTERM. Its value is the id of the run."""
CODE_SERVER_TAG = ".dagster/grpc_info"
"""Tag that Dagster's default launcher sets: the code server that executes the run."""
DEFINITIONS = "triplane_dagster.definitions"
"""Module of the code location."""
PATIENCE_S = 20.0
"""Time for the process of a canceled run to end by itself, in seconds."""

UNNAMED_S = 120.0
"""Time after its start in which the process of a run has named itself unless it died, in seconds."""

CANCELED = frozenset({dg.DagsterRunStatus.CANCELED})
ENDED = CANCELED | {dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE}

POLL_S = 5.0
"""Pause between two looks of a run's process at the record of the run, in seconds."""

_UNFINISHED = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def process_name(pid: int) -> str | None:
    """Identifier of a process on this machine that stays unique when its pid is reused; None if it is gone."""
    space, started = pid_space(), start_of(pid)
    if space is None or started is None:
        return None
    machine = space.replace(" pid:[", ":").removesuffix("]")
    return f"{socket.gethostname()}/{machine}/{pid}/{started}"


def process_tag(run_id: str) -> dict[str, str]:
    """Tag of a run that this process executes."""
    name = process_name(os.getpid())
    return {} if name is None else {PROCESS_TAG: f"{name}/{run_id}"}


@contextmanager
def end_with_record(
    instance: dg.DagsterInstance, run_id: str, ends: Container[dg.DagsterRunStatus] = ENDED
) -> Iterator[None]:
    """Context in which this process gets SIGTERM once the run that it executes is deleted or has one of these states:
    the next run of its experiment starts then.
    """
    over = threading.Event()
    arguments = (instance, run_id, ends, over)
    watcher = threading.Thread(target=_watch_record, args=arguments, name="run-record", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch_record(
    instance: dg.DagsterInstance, run_id: str, ends: Container[dg.DagsterRunStatus], over: threading.Event
) -> None:
    begun = False
    while True:
        with suppress(Exception):  # whatever the database's driver raises while it is away
            run = instance.get_run_by_id(run_id)
            begun = begun or run is not None
            if begun and (run is None or run.status in ends) and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return
        if over.wait(POLL_S):
            return


def is_dead(name: str) -> bool:
    """Whether the process of a `process_name` is known to have ended; False if it ran where this process can't look."""
    return _lives(name) is False


def _lives(name: str) -> bool | None:
    """Whether the process of a `process_name` lives; None if it runs where this process can't look."""
    here, parts = process_name(os.getpid()), name.split("/")
    if here is None or len(parts) != len(here.split("/")) or parts[0] != here.split("/")[0]:
        return None
    boot, _, namespace = parts[1].partition(":")
    own_boot, _, own_namespace = here.split("/")[1].partition(":")
    if boot != own_boot:
        return False
    if namespace and namespace != own_namespace:
        return None
    try:
        return start_of(int(parts[2])) == parts[3]
    except (OSError, ValueError):
        return None


def end_dead_runs(instance: dg.DagsterInstance) -> list[str]:
    """End unfinished runs whose process died on this machine, also between its start and its tag. Returns their ids.

    Runs in other pods are none of them: the run launcher watches those. It is asked for those that have not started.

    A run of the UI is marked as failed, so that `run_retries` launches it again. A run of the command line is marked as
    canceled, since whoever gave the command repeats it, and so is one that somebody was terminating.

    The process of one that somebody is terminating, and that works on, is told to end: a code server that was started
    again does not know the runs of the one before.
    """
    ended = []
    for record in instance.get_run_records(dg.RunsFilter(statuses=_UNFINISHED)):
        run, waits_s = record.dagster_run, time.time() - record.update_timestamp.timestamp()
        name, _, executed = run.tags.get(PROCESS_TAG, "").rpartition("/")
        if executed != run.run_id and not (waits_s > UNNAMED_S and _has_lost_its_process(run)):
            continue
        if run.status is dg.DagsterRunStatus.CANCELING and waits_s > PATIENCE_S and _lives(name):
            _tell_to_end(instance, run, int(name.split("/")[2]))
        elif executed != run.run_id or is_dead(name):
            why = "The process died. Committed work is kept; the next run continues from it."
            if run.remote_job_origin is None or run.status is dg.DagsterRunStatus.CANCELING:
                instance.report_run_canceled(run, why)
            else:
                instance.report_run_failed(run, why)
            ended.append(run.run_id)
    return [*ended, *_end_lost_starts(instance)]


def _has_lost_its_process(run: dg.DagsterRun) -> bool:
    """Whether a process that one of our code servers started has begun a run, and did not name itself at once."""
    origin = run.job_code_origin
    ours = origin is not None and getattr(origin.repository_origin.code_pointer, "module", "") == DEFINITIONS
    return (
        ours and run.status is dg.DagsterRunStatus.STARTED and CODE_SERVER_TAG in run.tags and pid_space() is not None
    )


def _tell_to_end(instance: dg.DagsterInstance, run: dg.DagsterRun, pid: int) -> None:
    """Send SIGTERM to the process of a run, once: a second signal would disturb its cleaning up."""
    if run.tags.get(TOLD_TAG) != run.run_id:
        instance.add_run_tags(run.run_id, {TOLD_TAG: run.run_id})
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _end_lost_starts(instance: dg.DagsterInstance) -> list[str]:
    """End runs whose pod died before it began, or does not start, if the run launcher can tell. Returns their ids."""
    why_not: Callable[[dg.DagsterRun], str | None] | None
    why_not = getattr(instance.run_launcher, "why_not_starting", None)
    ended = []
    for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTING])) if why_not else []:
        why = why_not(run) if why_not else None
        now = instance.get_run_by_id(run.run_id) if why else None
        if now is not None and now.status is dg.DagsterRunStatus.STARTING:
            instance.report_run_failed(now, f"{why} Committed work is kept; the next run continues from it.")
            instance.run_launcher.remove_run(now)  # type: ignore[attr-defined]
            ended.append(run.run_id)
    return ended
