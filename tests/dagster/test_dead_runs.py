from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.code_pointer import ModuleCodePointer
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin

from contracts.processes import start_of
from resources.experiment import Experiment
from triplane_dagster import dead_runs
from triplane_dagster.dead_runs import (
    CODE_SERVER_TAG,
    DEFINITIONS,
    PROCESS_TAG,
    end_dead_runs,
    process_name,
    process_tag,
)
from triplane_dagster.run import Runner

SLEEPER = """
import os, sys, time, dagster as dg
from triplane_dagster.dead_runs import process_tag

@dg.op
def sleep():
    print("asleep", flush=True)
    time.sleep(600)

@dg.job
def nap():
    sleep()

run_id, executed = sys.argv[2:]
with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
    nap.execute_in_process(instance=instance, run_id=run_id, tags=process_tag(executed))
"""


@contextmanager
def sleeping(folder: Path, run_id: str, executed: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in whose run an op sleeps. executed: run in the tag."""
    child = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(folder), run_id, executed],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"asleep\n"
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_killed_run_is_canceled_and_a_living_one_is_not(tmp_path: Path) -> None:
    run_id = str(uuid.uuid4())
    with sleeping(tmp_path, run_id, run_id) as child, dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert end_dead_runs(instance) == []
        child.kill()
        child.wait()
        (run,) = instance.get_runs()
        assert run.tags[PROCESS_TAG].split("/")[2] == str(child.pid)
        assert end_dead_runs(instance) == [run.run_id]
        assert instance.get_runs()[0].status is dg.DagsterRunStatus.CANCELED


@pytest.mark.slow
def test_a_process_that_no_code_server_ends_is_told_to_once_somebody_terminates_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = str(uuid.uuid4())
    with sleeping(tmp_path, run_id, run_id) as child, dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
        instance.report_run_canceling(run)
        assert end_dead_runs(instance) == [] and child.poll() is None, "the code server may have passed it on"
        monkeypatch.setattr(dead_runs, "PATIENCE_S", 0.0)
        for _ in range(2):
            assert end_dead_runs(instance) == []
        child.wait(30)
        assert instance.get_runs()[0].status is dg.DagsterRunStatus.CANCELED


NAP = """
import time, dagster as dg
from pathlib import Path
from triplane_dagster.executors import step_executor

@dg.op
def sleep():
    Path("asleep").touch()
    time.sleep(600)

@dg.job(executor_def=step_executor())
def nap():
    sleep()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", "canceled"])
def test_a_process_whose_run_is_deleted_or_marked_as_canceled_meanwhile_ends(how: str, tmp_path: Path) -> None:
    (tmp_path / "naps.py").write_text(NAP)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "dagster", "job", "execute", "-f", "naps.py", "-j", "nap"],
        cwd=tmp_path,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "asleep").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            (run,) = instance.get_runs()
            if how == "deleted":
                instance.delete_run(run.run_id)
            else:
                instance.report_run_canceled(run, "Force termination immediately")
        child.wait(30)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("how", [pytest.param("deleted", marks=pytest.mark.slow), "canceled", "failed"])
def test_a_command_ends_once_its_run_is_deleted_or_canceled_and_not_by_its_own_failure(
    how: str, tiny: Experiment, blank_dagster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    ours = SimpleNamespace(getpid=os.getpid, kill=lambda pid, number: told.set())
    monkeypatch.setattr(dead_runs, "os", ours)
    monkeypatch.setattr(dead_runs, "POLL_S", 0.02)

    @dg.op
    def end() -> None:
        (run,) = instance.get_runs()
        if how == "deleted":
            instance.delete_run(run.run_id)
        elif how == "canceled":
            instance.report_run_canceled(run, "Force termination immediately")
        if how == "failed" or told.wait(20):
            raise RuntimeError("it ended")

    @dg.job
    def nap() -> None:
        end()

    shutil.copytree(blank_dagster, tmp_path / "dagster")
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        runner = object.__new__(Runner)
        runner.experiment, runner._instance, runner._definitions = tiny, instance, dg.Definitions(jobs=[nap])
        with pytest.raises(RuntimeError, match="it ended"):
            runner._run("nap", None)
    assert told.is_set() == (how != "failed")


def test_a_repetition_is_not_taken_for_the_run_whose_tags_it_has(tmp_path: Path) -> None:
    """Dagster copies tags to repetitions; they wait or run in another process."""
    with (
        sleeping(tmp_path, str(uuid.uuid4()), executed=str(uuid.uuid4())) as child,
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
    ):
        child.kill()
        child.wait()
        assert end_dead_runs(instance) == []


@pytest.mark.parametrize(
    ("module", "named", "waits_s", "ended"),
    [
        (DEFINITIONS, False, 130, True),
        (DEFINITIONS, False, 60, False),
        (DEFINITIONS, True, 130, False),
        ("x", False, 130, False),
    ],
    ids=["lost", "beginning", "alive", "of another code location"],
)
def test_a_run_whose_process_was_killed_before_it_named_itself_is_ended(
    module: str,
    named: bool,
    waits_s: float,
    ended: bool,
    blank_dagster: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(blank_dagster, tmp_path / "dagster")
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        place = RepositoryPythonOrigin(sys.executable, ModuleCodePointer(module, "defs"))
        run_id = str(uuid.uuid4())
        tags = {CODE_SERVER_TAG: "{}", **(process_tag(run_id) if named else {})}
        started = dg.DagsterRun(
            "nap", run_id, status=dg.DagsterRunStatus.STARTED, tags=tags, job_code_origin=JobPythonOrigin("nap", place)
        )
        instance.add_run(started)
        now = time.time()
        monkeypatch.setattr(dead_runs, "time", SimpleNamespace(time=lambda: now + waits_s))
        assert end_dead_runs(instance) == ([run_id] if ended else [])


def test_process_identity_contains_pid_and_start_time() -> None:
    mine = process_name(os.getpid())
    assert mine is not None and mine.endswith(f"/{os.getpid()}/{start_of(os.getpid())}")
    child = subprocess.Popen(["sleep", "60"])
    assert process_name(child.pid) not in (None, mine)
    child.kill()
    child.wait()
    assert process_name(child.pid) is None
