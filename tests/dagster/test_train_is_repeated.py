"""A killed run of `NAME_train` is launched again: one launch is one request, wherever it was killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import RunFailureReason
from dagster._core.execution.retries import auto_reexecution_should_retry_run
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, RETRY_NUMBER_TAG, ROOT_RUN_ID_TAG
from test_sequence import Desk, desk

from triplane_dagster.targets import last_target, unfinished_target
from triplane_dagster.training_job import Training, train_config, train_job_name

__all__ = ["desk"]
DEAD = "11111111-1111-1111-1111-111111111111"


def launch(desk: Desk, tags: dict[str, str] | None = None, **training: Any) -> None:
    """A run of `NAME_train`; without tags the one that is killed."""
    job = desk.definitions.resolve_job_def(train_job_name(desk.experiment))
    config = train_config(desk.experiment, Training(**training))
    job.execute_in_process(instance=desk.instance, run_config=config, tags=tags, run_id=None if tags else DEAD)


def is_killed(desk: Desk, act: Callable[[], None], number: int, *, after: bool) -> bool:
    """Do something in a process that is killed before or after its n-th write of a target; False: it had fewer."""
    pid = os.fork()
    if pid == 0:
        store, seen = type(desk.store), [0]
        inner = store.create

        def create(self: Any, key: str, data: bytes) -> bool:
            if not key.startswith("pointers/targets/"):
                return inner(self, key, data)
            seen[0] += 1
            if seen[0] == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            made = inner(self, key, data)
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        store.create = create  # type: ignore[method-assign]
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def repeat(desk: Desk, **training: Any) -> None:
    """The run that Dagster launches in place of the killed one."""
    launch(desk, {ROOT_RUN_ID_TAG: DEAD, PARENT_RUN_ID_TAG: DEAD, RETRY_NUMBER_TAG: "1"}, **training)


def record_of_the_killed_run(desk: Desk) -> None:
    desk.instance.create_run_for_job(desk.definitions.resolve_job_def(train_job_name(desk.experiment)), run_id=DEAD)


@pytest.mark.parametrize("after", [False, True])
def test_a_request_that_is_killed_at_any_write_is_made_once(desk: Desk, after: bool) -> None:
    assert is_killed(desk, lambda: launch(desk, iterations=2), 1, after=after)
    assert (unfinished_target(desk.store, desk.experiment) is not None) == after
    record_of_the_killed_run(desk)
    for _ in range(2):
        repeat(desk, iterations=2)
    target = unfinished_target(desk.store, desk.experiment)
    assert target is not None and (target.first, target.count, target.request) == (0, 2, DEAD)
    assert [desk.serve(), desk.serve(), desk.serve()] == ["0000", "0001", None]
    repeat(desk, iterations=2)
    assert unfinished_target(desk.store, desk.experiment) is None, "nothing is trained twice"
    assert not is_killed(desk, lambda: launch(desk, {"a": "b"}, iterations=0), 1, after=after)


def test_a_killed_request_that_somebody_ended_is_not_made_again_after_other_ones(desk: Desk) -> None:
    assert is_killed(desk, lambda: launch(desk, iterations=2), 1, after=True)
    record_of_the_killed_run(desk)
    desk.train(iterations=0)
    desk.train(iterations=1)
    desk.train(iterations=0)
    before = last_target(desk.store, desk.experiment)
    repeat(desk, iterations=2)
    assert last_target(desk.store, desk.experiment) == before


@pytest.mark.parametrize("after", [False, True])
def test_an_end_that_is_killed_at_any_write_spares_what_was_asked_for_later(desk: Desk, after: bool) -> None:
    desk.train(iterations=3)
    assert is_killed(desk, lambda: launch(desk, iterations=0), 1, after=after)
    record_of_the_killed_run(desk)
    repeat(desk, iterations=0)
    assert unfinished_target(desk.store, desk.experiment) is None
    desk.train(iterations=1, reason="another")
    repeat(desk, iterations=0)
    target = unfinished_target(desk.store, desk.experiment)
    assert target is not None and target.reason == "another"


def test_dagster_launches_a_killed_request_again(desk: Desk) -> None:
    with dg.DagsterInstance.local_temp(
        overrides={"run_retries": {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": False}}
    ) as instance:
        job = desk.definitions.resolve_job_def(train_job_name(desk.experiment))
        run = instance.create_run_for_job(job, tags=job.run_tags)
        instance.report_run_failed(run)
        failed = instance.get_run_by_id(run.run_id)
        assert failed is not None
        assert auto_reexecution_should_retry_run(instance, failed, RunFailureReason.RUN_EXCEPTION)
        assert failed.tags["dagster/retry_strategy"] == "ALL_STEPS"
