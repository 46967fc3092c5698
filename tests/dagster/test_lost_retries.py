"""A run that died together with the code server, so that Dagster could not launch it again, fails once more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._daemon.auto_run_reexecution.auto_run_reexecution import consume_new_runs_for_automatic_reexecution

from triplane_dagster.lost_retries import ATTEMPTS, PARENT_TAG, RETRY_TAG, WILL_RETRY_TAG, fail_again
from triplane_dagster.private_dagster import DagsterUserCodeUnreachableError


class Daemon:
    """Dagster's own retries, in a daemon whose code server is away."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance

    def create_request_context(self) -> None:
        raise DagsterUserCodeUnreachableError("Could not reach user code server")

    def tick(self) -> None:
        context: Any = self
        for _ in consume_new_runs_for_automatic_reexecution(context, self.instance.get_run_records(), logging.root):
            pass


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    retries = {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": False}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"run_retries": retries}) as made:
        yield made


@pytest.fixture
def dead(instance: dg.DagsterInstance) -> dg.DagsterRun:
    """A run whose process died."""
    run = instance.add_run(dg.DagsterRun(job_name="tiny_iteration", status=dg.DagsterRunStatus.STARTED))
    instance.report_run_failed(run)
    assert will_retry(instance, run)
    return run


def will_retry(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    now = instance.get_run_by_id(run.run_id)
    assert now is not None and now.status is dg.DagsterRunStatus.FAILURE
    return now.tags[WILL_RETRY_TAG] == "true"


def failures(instance: dg.DagsterInstance, run: dg.DagsterRun) -> int:
    """Events on each of which the daemon tries to launch the run again."""
    return len(instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_FAILURE))


def test_a_retry_that_found_no_code_server_is_tried_again_and_not_forever(
    instance: dg.DagsterInstance, dead: dg.DagsterRun
) -> None:
    assert fail_again(instance) == [], "Dagster has not tried yet"
    for attempt in range(1, ATTEMPTS):
        Daemon(instance).tick()
        assert not will_retry(instance, dead), "Dagster has given up"
        assert fail_again(instance) == [dead.run_id]
        assert will_retry(instance, dead) and failures(instance, dead) == attempt + 1
        assert fail_again(instance) == [], "it is Dagster's turn"
    Daemon(instance).tick()
    assert fail_again(instance) == [] and not will_retry(instance, dead)


def test_a_run_that_somebody_has_re_executed_is_left_alone(instance: dg.DagsterInstance, dead: dg.DagsterRun) -> None:
    Daemon(instance).tick()
    tags = {PARENT_TAG: dead.run_id, "dagster/root_run_id": dead.run_id}
    instance.add_run(dg.DagsterRun(job_name=dead.job_name, status=dg.DagsterRunStatus.SUCCESS, tags=tags))
    assert fail_again(instance) == []


def test_a_repetition_that_was_made_and_not_submitted_is_no_reason_to_stop(
    instance: dg.DagsterInstance, dead: dg.DagsterRun
) -> None:
    Daemon(instance).tick()
    tags = {PARENT_TAG: dead.run_id, "dagster/root_run_id": dead.run_id, RETRY_TAG: "1"}
    instance.add_run(dg.DagsterRun(job_name=dead.job_name, tags=tags))
    assert fail_again(instance) == [dead.run_id]


def test_an_error_of_a_step_is_no_lost_retry(instance: dg.DagsterInstance) -> None:
    @dg.op
    def fail() -> None:
        raise ValueError("an error")

    @dg.job
    def failing() -> None:
        fail()

    failing.execute_in_process(instance=instance, raise_on_error=False)
    Daemon(instance).tick()
    (run,) = instance.get_runs()
    assert not will_retry(instance, run) and fail_again(instance) == []
