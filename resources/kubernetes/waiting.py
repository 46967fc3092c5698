"""Why the pods of a training have not started, in the cluster's own words."""

from __future__ import annotations

from typing import Any

from resources.kubernetes.client import Api
from resources.kubernetes.manifests import QUEUE, is_set, node_count, pods_job_name
from resources.kubernetes.watching import PodRecord, Watched

Object = dict[str, Any]

HOPELESS = ("InvalidImageName", "ErrImageNeverPull")
"""Reasons to wait that no time mends."""
_FIXES = {
    "ErrImagePull": "check TRIPLANE_KUBERNETES_IMAGE and the credentials for its registry",
    "CreateContainerConfigError": "create what is missing, or correct TRIPLANE_KUBERNETES_ENV",
    "Unschedulable": "add such nodes, lower trainer.launcher.gpus or placement.trainer, or wait longer",
    "FailedCreate": "raise the quota, lower placement.trainer, or correct what refuses the pod",
}
_FIXES |= dict.fromkeys(("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"), _FIXES["ErrImagePull"])


def waiting_reason(record: PodRecord) -> tuple[str, str] | None:
    """(reason, message) for which a pod has not started, or None: it has, or nothing is known."""
    waiting = record.state.get("waiting") or {}
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        return waiting["reason"], waiting.get("message", "")
    for each in record.pod.get("status", {}).get("conditions") or []:
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return each.get("reason", "Unschedulable"), each.get("message", "")
    return None


def why_waiting(watched: Watched, api: Api) -> tuple[str, str]:
    """(reason, words) for which not all pods of the training have started. Raises ApiFault."""
    for record in watched.records:
        found = waiting_reason(record)
        if found is not None:
            return found[0], _words(f"pod {record.name}", *found)
    training, job = watched.training, watched.job
    if training["spec"].get("suspend"):
        queue = training["metadata"]["labels"].get(QUEUE, "")
        said = _last_of(_workload_events(api, training)) or _last_of(api.events(_about(training)))
        return "Suspended", _words(f"queue {queue} has not admitted it", "Suspended", said)
    if job is None:
        said = _last_of(api.events(_about(training))) or "check the JobSet controller of the cluster"
        return "Pending", f"Job {pods_job_name(training)} has not been created: {said}"
    if len(watched.pods) < node_count(training):
        said = _last_of([each for each in api.events(_about(job)) if each.get("reason") == "FailedCreate"])
        if said:
            return "FailedCreate", _words("a pod could not be created", "FailedCreate", said)
    for record in watched.records:
        if not record.started:
            said = _last_of(api.events(_about(record.pod))) or "no reason given"
            return "Pending", f"pod {record.name} has not started: {said}"
    return "Pending", "its pods have not been created: check the Job controller of the cluster"


def _words(what: str, reason: str, message: str) -> str:
    fix = _FIXES.get(reason, "correct it")
    return f"{what}: {reason}: {' '.join(message.split())[:500] or 'no reason given'}; {fix}"


def _about(whole: Object) -> str:
    """Selector of the events about an object."""
    return f"involvedObject.uid={whole['metadata']['uid']}"


def _workload_events(api: Api, training: Object) -> list[Object]:
    """Events about Kueue's Workload, which say why a training waits. Its name is `KIND-NAME-HASH`."""
    kind = "jobset" if is_set(training) else "job"
    name = f"{kind}-{training['metadata']['name']}-"
    return [
        each
        for each in api.events("involvedObject.kind=Workload")
        if str(each["involvedObject"].get("name", "")).startswith(name)
    ]


def _last_of(events: list[Object]) -> str:
    """Message of the last event, warnings first; empty if there is none."""
    events = sorted(events, key=lambda each: each.get("type") == "Warning")
    return str(events[-1].get("message", "")) if events else ""
