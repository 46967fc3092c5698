"""Run launcher for Kubernetes: Dagster's, which runs each run in a pod, with answers that let runs survive outages.

Dagster's own takes an API server that does not reply for a dead run, and launches a second pod beside the living one;
and the steps of a run whose pod was lost go on beside those of its repetition. Name it in dagster.yaml:

    run_launcher: {module: triplane_dagster.run_pods, class: RunPodLauncher, config: ...}  # config of K8sRunLauncher
"""

from __future__ import annotations

import logging
import time
from typing import Any

from dagster import DagsterRun
from dagster_k8s import K8sRunLauncher
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from triplane_dagster.pending_pods import EARLIER, start_bound_s, why_not_started
from triplane_dagster.pod_faults import faults_of
from triplane_dagster.private_dagster import CheckRunHealthResult, WorkerStatus

_log = logging.getLogger(__name__)
LAUNCH_S = 60.0
"""Seconds after which a run without a Job will not get one: whoever launches it makes the Job at once, or fails."""
_NO_JOB = "could not be found"
_RUN, _STEP = "dagster-run-", "dagster-step-"
"""Beginnings of the names of Jobs."""


class RunPodLauncher(K8sRunLauncher):
    """Launches each run in a pod and checks it there."""

    def check_run_worker_health(self, run: DagsterRun) -> Any:
        """Health of a run; FAILED, with the reason of its pod, only if the API server says so."""
        found = super().check_run_worker_health(run)
        if found.status is WorkerStatus.UNKNOWN and _NO_JOB not in (found.msg or ""):
            return CheckRunHealthResult(
                WorkerStatus.RUNNING, f"the API server does not reply: checking again later ({found.msg})"
            )
        if found.status not in (WorkerStatus.UNKNOWN, WorkerStatus.FAILED):
            return found
        self._end_steps(run)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"{found.msg} {self._why(run)}".strip())

    def why_not_starting(self, run: DagsterRun) -> str | None:
        """Why the pod of a run that has not started will not run it; None as long as it may.

        Dagster asks for the health of started runs only, and gives a starting one all of `start_timeout_seconds`.
        """
        found = super().check_run_worker_health(run)
        if found.status is WorkerStatus.FAILED:
            return f"{found.msg} {self._why(run)}".strip()
        launched, bound = self._instance.get_run_stats(run.run_id).launch_time, start_bound_s(self._instance)
        waited = time.time() - launched if launched else 0.0
        if found.status is WorkerStatus.UNKNOWN and _NO_JOB in (found.msg or "") and waited > LAUNCH_S:
            return f"The run has no Job {waited:.0f} s after its launch: the daemon that launched it has ended."
        if not launched or bound <= 0 or waited < EARLIER * bound:
            return None
        try:
            why = why_not_started(self._api_client, f"{_RUN}{run.run_id}", self._namespace(run))
        except (ApiException, HTTPError):
            return None  # asked again at the next look
        return why and f"The run's pod has not started within {waited:.0f} s (runs.startTimeoutSeconds): {why}."

    def remove_run(self, run: DagsterRun) -> None:
        """Delete the Job of a run that has ended, so that its pod does not start later."""
        try:
            self._api_client.delete_job(job_name=f"{_RUN}{run.run_id}", namespace=self._namespace(run))
        except (ApiException, HTTPError) as error:
            _log.warning("the Job of run %s can't be deleted: %s", run.run_id, type(error).__name__)

    def _why(self, run: DagsterRun) -> str:
        try:
            job = f"{_RUN}{run.run_id}"
            return faults_of(self._api_client.get_pods_in_job(job, self._namespace(run)))
        except (ApiException, HTTPError) as error:  # the run has failed anyway, without a reason in words
            return f"(its pod can't be read: {type(error).__name__})"

    def _end_steps(self, run: DagsterRun) -> None:
        """Delete the Jobs of a lost run's steps; Kubernetes does the same once it deletes the run's pod."""
        namespace, api = self._namespace(run), self._api_client.batch_api
        try:
            for job in api.list_namespaced_job(namespace, label_selector=f"dagster/run-id={run.run_id}").items:
                name, status = job.metadata.name, job.status
                if name.startswith(_STEP) and not status.succeeded and not status.failed:
                    api.delete_namespaced_job(name, namespace, propagation_policy="Background")
        except (ApiException, HTTPError) as error:
            _log.warning("steps of run %s can't be ended: %s", run.run_id, type(error).__name__)

    def _namespace(self, run: DagsterRun) -> str:
        return str(self.get_container_context_for_run(run).namespace)
