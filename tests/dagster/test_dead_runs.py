from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg

from contracts.processes import start_of
from triplane_dagster.dead_runs import PROCESS_TAG, cancel_dead_runs, process_name

SLEEPER = """
import os, sys, time, dagster as dg
from triplane_dagster.dead_runs import PROCESS_TAG, process_name

@dg.op
def sleep():
    print("asleep", flush=True)
    time.sleep(600)

@dg.job
def nap():
    sleep()

with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
    nap.execute_in_process(instance=instance, tags={PROCESS_TAG: process_name(os.getpid())})
"""


def test_a_killed_run_is_canceled_and_a_living_one_is_not(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"asleep\n"
        with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
            assert cancel_dead_runs(instance) == []
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            (run,) = instance.get_runs()
            assert run.tags[PROCESS_TAG].split("/")[2] == str(child.pid)
            assert cancel_dead_runs(instance) == [run.run_id]
            assert instance.get_runs()[0].status is dg.DagsterRunStatus.CANCELED
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_process_identity_contains_pid_and_start_time() -> None:
    mine = process_name(os.getpid())
    assert mine is not None and mine.endswith(f"/{os.getpid()}/{start_of(os.getpid())}")
    child = subprocess.Popen(["sleep", "60"])
    assert process_name(child.pid) not in (None, mine)
    child.kill()
    child.wait()
    assert process_name(child.pid) is None
