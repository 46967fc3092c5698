"""Why the pods of a Job have not started, in the cluster's own words."""

from __future__ import annotations

from typing import Any

from resources.kubernetes.client import Api
from resources.kubernetes.manifests import QUEUE
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
    """(reason, words) for which not all pods of the Job have started. Raises ApiFault."""
    for record in watched.records:
        found = waiting_reason(record)
        if found is not None:
            return found[0], _words(f"pod {record.name}", *found)
    job = watched.job
    if job["spec"].get("suspend"):
        queue = job["metadata"]["labels"].get(QUEUE, "")
        said = _last_event(api, job["metadata"]["uid"], "")
        return "Suspended", _words(f"queue {queue} has not admitted it", "Suspended", said)
    if len(watched.pods) < int(job["spec"]["parallelism"]):
        said = _last_event(api, job["metadata"]["uid"], "FailedCreate")
        if said:
            return "FailedCreate", _words("a pod could not be created", "FailedCreate", said)
    for record in watched.records:
        if not record.started:
            said = _last_event(api, record.uid, "") or "no reason given"
            return "Pending", f"pod {record.name} has not started: {said}"
    return "Pending", "its pods have not been created: check the Job controller of the cluster"


def _words(what: str, reason: str, message: str) -> str:
    fix = _FIXES.get(reason, "correct it")
    return f"{what}: {reason}: {' '.join(message.split())[:500] or 'no reason given'}; {fix}"


def _last_event(api: Api, uid: str, reason: str) -> str:
    """Message of the last event about an object, warnings first. reason: only these events, if given."""
    events = [each for each in api.events(uid) if reason in ("", each.get("reason"))]
    events.sort(key=lambda each: each.get("type") == "Warning")
    return str(events[-1].get("message", "")) if events else ""
