"""Faults of the infrastructure are retried, bounded; other errors end a step at once, in one process and in pods."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest

from contracts.errors import ConfigError, InfraFault, StoreUnreachable
from contracts.processes import start_of
from ops import retries
from ops.retries import RETRIES, bounded, step_retries, steps_in_one_process
from resources.errors import EvaluationIncomplete

RUN_OF_A_STEP = """
import multiprocessing, os, time
from ops.retries import bounded

@bounded
def step(context):
    print(os.getpid(), flush=True)
    time.sleep(60)

child = multiprocessing.get_context("fork").Process(target=step, args=(None,))
child.start()
child.join()
"""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FAULT_DELAY_S", 0.0)
    monkeypatch.setattr(retries, "LOST_DELAY_S", 0.0)


def job_of(function: Callable[[], Any]) -> dg.JobDefinition:
    @dg.op(retry_policy=step_retries())
    @bounded
    def act(context: dg.OpExecutionContext) -> None:
        function()

    @dg.job
    def job() -> None:
        act()

    return job


def failing(times: int, error: Exception) -> tuple[list[int], Callable[[], None]]:
    """A function that fails that many times, and its calls."""
    calls: list[int] = []

    def function() -> None:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error

    return calls, function


@pytest.mark.parametrize("fault", [InfraFault("no engine"), StoreUnreachable("no S3"), EvaluationIncomplete("lost")])
def test_a_fault_is_retried_once_in_one_process_and_then_raised_as_it_is(fault: Exception) -> None:
    calls, function = failing(1, fault)
    assert job_of(function).execute_in_process().success and len(calls) == 2
    calls, function = failing(2, fault)
    with pytest.raises(type(fault), match=str(fault)):
        job_of(function).execute_in_process()
    assert len(calls) == 2


def test_another_error_is_raised_as_it_is_at_once() -> None:
    calls, function = failing(1, ConfigError("seed=-1: must be at least 0"))
    with pytest.raises(ConfigError, match="seed=-1"):
        job_of(function).execute_in_process()
    assert len(calls) == 1


def test_a_pod_retries_a_fault_and_tells_it_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "k8s")
    calls, function = failing(RETRIES, InfraFault("no engine"))
    assert job_of(function).execute_in_process().success and len(calls) == RETRIES + 1
    calls, function = failing(99, InfraFault("no engine"))
    failed = job_of(function).execute_in_process(raise_on_error=False)
    assert len(calls) == RETRIES + 1
    (event,) = [each for each in failed.all_events if each.is_step_failure]
    error = event.step_failure_data.error
    assert error and error.cause and "no engine" in error.cause.message


def test_a_pod_does_not_repeat_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "k8s")
    calls, function = failing(99, ConfigError("seed=-1: must be at least 0"))
    failed = job_of(function).execute_in_process(raise_on_error=False)
    assert len(calls) == 1
    (event,) = [each for each in failed.all_events if each.is_step_failure]
    error = event.step_failure_data.error
    assert (
        error and error.cause and error.cause.message == "contracts.errors.ConfigError: seed=-1: must be at least 0\n"
    )


def test_a_pod_that_is_told_to_end_is_replaced_and_ctrl_c_in_one_process_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "k8s")
    calls: list[int] = []

    def evicted() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    assert job_of(evicted).execute_in_process().success and len(calls) == 2
    calls.clear()
    with steps_in_one_process():
        job = job_of(evicted)
    with pytest.raises(KeyboardInterrupt):
        job.execute_in_process()
    assert len(calls) == 1


def test_ops_that_yield_are_bounded_as_well() -> None:
    calls, function = failing(1, InfraFault("no engine"))

    @dg.op(out=dg.DynamicOut(int))
    @bounded
    def plan(context: dg.OpExecutionContext) -> Iterator[dg.DynamicOutput[int]]:
        function()
        yield dg.DynamicOutput(1, mapping_key="one")

    @dg.op
    def use(number: int) -> int:
        return number

    @dg.job
    def job() -> None:
        plan().map(use)

    assert job.execute_in_process().output_for_node("use") == {"one": 1} and len(calls) == 2


def test_a_process_of_a_step_ends_when_that_of_its_run_is_killed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN_OF_A_STEP],
        stdout=subprocess.PIPE,
        env={**os.environ, "TRIPLANE_EXECUTOR": "multiprocess"},
    )
    assert run.stdout is not None
    step = int(run.stdout.readline())
    run.kill()
    run.wait()
    deadline = time.monotonic() + 10
    while start_of(step) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.stdout.close()
    assert start_of(step) is None
