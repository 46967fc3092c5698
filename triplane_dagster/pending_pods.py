"""Why the pod of a run or step has not started, and how long it may take: `run_monitoring.start_timeout_seconds`.

Dagster bounds the start of runs only, leaves the Job of a run that it gives up, and lets a step wait for ever.
"""

from __future__ import annotations

from typing import Any

import dagster as dg

from triplane_dagster.pod_faults import faults_of

EARLIER = 0.9
"""Share of the bound after which a run is given up here: before Dagster does it, which leaves the Job."""


def start_bound_s(instance: dg.DagsterInstance) -> float:
    """Seconds in which a pod must have started; the chart's value runs.startTimeoutSeconds."""
    return float(instance.run_monitoring_start_timeout_seconds)


def why_not_started(client: Any, job: str, namespace: str) -> str | None:
    """Why no pod of a Job has started, in the cluster's words; None if one has.

    client: a DagsterKubernetesClient. Raises ApiException or HTTPError.
    """
    pods = client.get_pods_in_job(job, namespace)
    if any(_has_started(pod) for pod in pods):
        return None
    names = [pod.metadata.name for pod in pods] or [job]
    events = [event for name in names for event in client.retrieve_pod_events(name, namespace)]
    said = next((event.message for event in reversed(events) if event.type == "Warning"), "")
    return faults_of(pods) or said or f"no event says why: see `kubectl describe job {job}`"


def _has_started(pod: Any) -> bool:
    states = [status.state for status in pod.status.container_statuses or [] if status.state]
    return pod.status.phase in ("Succeeded", "Failed") or any(state.running or state.terminated for state in states)
