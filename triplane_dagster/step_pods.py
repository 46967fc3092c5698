"""Executor that runs each step in a pod of its own: Dagster's, with settings under which a lost pod costs a retry.

    pod killed, evicted, deleted, node lost  ->  its Job fails at once (backoffLimit 0)  ->  seen within CHECK_S
        ->  the op's RetryPolicy  ->  a new Job  (`ops.retries`)

With a replacement by the Job itself (backoffLimit above 0, podFailurePolicy Ignore) the second pod would find the step
begun, exit with 0, and the run would wait forever (dagster 33755).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_k8s import k8s_job_executor
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.pending_pods import start_bound_s, why_not_started
from triplane_dagster.pod_faults import faults_of
from triplane_dagster.private_dagster import (
    CheckStepHealthResult,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
)
from triplane_dagster.step_pool import VARIABLE, PooledSteps

JOB_SPEC = {"backoff_limit": 0, "ttl_seconds_after_finished": 3600}
"""Fields of the Jobs of steps. An hour leaves time to read why a pod failed."""
CHECK_S = 5
"""Seconds between two checks of a step's pod."""
POLL_S = 0.1
"""Seconds between two looks for events of steps."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

step_pods_definition = k8s_job_executor
"""Dagster's executor. Its run configuration (max_concurrent, ...) stays that of Dagster."""


def configured(given: Mapping[str, Any]) -> dict[str, Any]:
    """Executor configuration with our settings for what `given` leaves open.

    Image, environment, volumes and service account are those of the run launcher. Jobs of steps belong to the run's
    pod, so that Kubernetes deletes them with it.
    """
    own = dict(given.get("step_k8s_config") or {})
    own["job_spec_config"] = {**(own.get("job_spec_config") or {}), **JOB_SPEC}
    return {**given, "step_k8s_config": own, "enable_owner_references": _ACCOUNT.exists()}


def prepared(executor: dg.Executor) -> dg.Executor:
    """Let an executor of step pods check them more often, say why a pod was lost, and use the pool, if there is one.

    Raises ConfigError for a pool that can't be used.
    """
    assert isinstance(executor, StepDelegatingExecutor), "k8s_job_executor makes one"
    handler: StepHandler = _NamedFaults(executor._step_handler)
    if pool := os.environ.get(VARIABLE):
        handler = PooledSteps(handler, pool, experiments_folder())
    executor._step_handler = handler
    executor._check_step_health_interval_seconds = CHECK_S
    executor._sleep_seconds = POLL_S
    return executor


class _NamedFaults(StepHandler):
    """Step handler of dagster-k8s whose failed health checks tell the pod's fault, and which gives up a pod that does
    not start.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self._waiting: dict[str, float | None] = {}
        """Since when the pod of a step is waited for, by its Job; None: it has started."""

    @property
    def name(self) -> str:
        """See StepHandler.name."""
        return str(self._inner.name)

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        """See StepHandler.launch_step."""
        yield from self._inner.launch_step(step_handler_context)

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        """Health of the step's Job; if it failed, with the reason of its pod."""
        found: CheckStepHealthResult = self._inner.check_step_health(step_handler_context)
        if found.is_healthy:
            return self._bounded(step_handler_context, found)
        return CheckStepHealthResult.unhealthy(f"{found.unhealthy_reason} {self._why(step_handler_context)}".strip())

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[dg.DagsterEvent]:
        """See StepHandler.terminate_step."""
        yield from self._inner.terminate_step(step_handler_context)

    def _bounded(self, context: StepHandlerContext, found: CheckStepHealthResult) -> CheckStepHealthResult:
        """`found`, or what ends a step whose pod has not started in time. Its Job is deleted."""
        job, namespace = self._job(context)
        since = self._waiting.setdefault(job, time.monotonic())
        if since is None:
            return found
        try:
            why = why_not_started(self._inner._api_client, job, namespace)
        except (ApiException, HTTPError):
            return found  # checked again in CHECK_S
        if why is None:
            self._waiting[job] = None
        bound = start_bound_s(context.instance)
        if why is None or bound <= 0 or time.monotonic() - since < bound:
            return found
        self._inner._api_client.delete_job(job_name=job, namespace=namespace)
        return CheckStepHealthResult.unhealthy(
            f"The pod did not start within {bound:g} s (run_monitoring.start_timeout_seconds): {why}"
        )

    def _job(self, context: StepHandlerContext) -> tuple[str, str]:
        """Name and namespace of the step's Job."""
        return self._inner._get_k8s_step_job_name(context), str(self._inner._get_container_context(context).namespace)

    def _why(self, context: StepHandlerContext) -> str:
        job, namespace = self._job(context)
        try:
            return faults_of(self._inner._api_client.get_pods_in_job(job, namespace))
        except (ApiException, HTTPError) as error:  # the step has failed anyway, without a reason in words
            return f"(its pod can't be read: {type(error).__name__})"
