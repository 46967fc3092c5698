"""Retries of a step: faults of the infrastructure are retried, bounded and with jitter; other errors are not.

Dagster's RetryPolicy retries every error, also a wrong setting. So every step's function is wrapped by `bounded`:

                                 steps in one process            a pod for each step
    fault of infrastructure      once                            up to RETRIES times
    any other error              raised as it is                 dg.Failure that forbids a retry
    pod killed, evicted, lost                                    up to RETRIES times, by the policy of `step_retries`
    Ctrl-C, Terminate            ends the run                    ends the run

A process for each step ends when the run's process is killed: the repetition of the run would work beside it.

An interrupt of a step with a RetryPolicy is a retry for Dagster, so steps of one process have no policy.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dagster as dg

from contracts.errors import InfraFault, StoreUnreachable
from contracts.parents import end_with_parent
from ops.spans import step_span
from resources.errors import DeploymentFailed, EvaluationIncomplete

EXECUTOR_VARIABLE = "TRIPLANE_EXECUTOR"
"""in_process: steps follow one another in the run's process. multiprocess: a process for each step, shards of rollouts
side by side. k8s: a pod for each step. `triplane iterate` always runs in its own process.
"""
INFRASTRUCTURE = (InfraFault, StoreUnreachable, EvaluationIncomplete, DeploymentFailed)
"""Errors that may be gone a few seconds later, without a change by a person."""
RETRIES = 3
"""Maximum retries of a step in a pod; lost pods and faults of infrastructure count together."""
LOST_DELAY_S = 2.0
"""Pause before a lost pod's first replacement, in seconds; it doubles, with as much jitter."""
FAULT_DELAY_S = 5.0
"""Maximum pause before the first retry of a fault, in seconds; it doubles."""

_one_process: ContextVar[bool] = ContextVar("one_process", default=False)


@contextmanager
def steps_in_one_process() -> Iterator[None]:
    """Context in which definitions are made whose steps run in this process, whatever $TRIPLANE_EXECUTOR says."""
    token = _one_process.set(True)
    try:
        yield
    finally:
        _one_process.reset(token)


def steps_are_pods() -> bool:
    """Whether the steps of the definitions that are made now run in pods of their own."""
    return _chosen("k8s")


def _chosen(executor: str) -> bool:
    return os.environ.get(EXECUTOR_VARIABLE) == executor and not _one_process.get()


@functools.cache
def _end_with_run() -> None:
    """End this process with that of its run. Does nothing where steps run in the run's own process, as in tests."""
    if multiprocessing.parent_process() is not None:
        end_with_parent()


def step_retries() -> dg.RetryPolicy | None:
    """Policy of every step: a pod that is lost, or told to end, is replaced. None for steps of one process."""
    if not steps_are_pods():
        return None
    return dg.RetryPolicy(RETRIES, LOST_DELAY_S, dg.Backoff.EXPONENTIAL, dg.Jitter.PLUS_MINUS)


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Function of an op or asset, whose first argument is Dagster's context, with a span and the retries of this
    module.
    """
    pods, processes = steps_are_pods(), _chosen("multiprocess")

    @contextmanager
    def attempt(context: Any) -> Iterator[None]:
        if processes:
            _end_with_run()
        try:
            with step_span(context):
                yield
        except Exception as error:
            _decide(error, context.retry_number, pods)
            raise

    @functools.wraps(function)
    def calls(context: Any, *args: Any, **kwargs: Any) -> Any:
        with attempt(context):
            return function(context, *args, **kwargs)

    @functools.wraps(function)
    def yields(context: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with attempt(context):
            yield from function(context, *args, **kwargs)

    return yields if inspect.isgeneratorfunction(function) else calls


def _decide(error: Exception, before: int, pods: bool) -> None:
    """Raise what makes Dagster retry the step, or forbids it. before: retries of the step so far."""
    if isinstance(error, dg.RetryRequested | dg.Failure):
        return
    most = RETRIES if pods else 1
    if isinstance(error, INFRASTRUCTURE) and before < most:
        pause = random.uniform(0.2, 1.0) * FAULT_DELAY_S * 2**before
        raise dg.RetryRequested(max_retries=most, seconds_to_wait=pause) from error
    if pods:
        raise dg.Failure(str(error), allow_retries=False) from error
