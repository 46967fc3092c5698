"""Why a pod of a run or step ended, in words: its memory limit, an eviction, a preemption, a lost node, a bad image."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SETTING = "placement.steps.memory"
_DISRUPTED = {
    "PreemptionByScheduler": "preempted by a pod of higher priority (`placement.steps.priority_class`)",
    "DeletionByTaintManager": "deleted with its node, which was lost or tainted",
    "EvictionByEvictionAPI": "evicted: its node is being drained",
    "DeletionByPodGC": "deleted with its node, which is gone",
    "TerminationByKubelet": "ended by its node's kubelet",
}
"""Words for reasons of the pod condition DisruptionTarget."""
_NOT_STARTED = (
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
)


def pod_fault(pod: Any) -> str | None:
    """Why a pod (V1Pod) ended, or does not start; None if its status gives no reason beyond an exit code."""
    return _killed(pod) or _disrupted(pod) or _not_started(pod)


def faults_of(pods: Iterable[Any]) -> str:
    """Reasons of all pods of a Job, in one line; empty if there is none."""
    told = ((pod.metadata.name, pod_fault(pod)) for pod in pods)
    return "; ".join(f"pod {name} {why}" for name, why in told if why)


def _statuses(pod: Any) -> list[Any]:
    return list(pod.status.container_statuses or [])


def _killed(pod: Any) -> str | None:
    for status in _statuses(pod):
        for state in (status.state, status.last_state):
            ended = state.terminated if state else None
            if ended and ended.reason == "OOMKilled":
                return f"was killed for memory: {_limit(pod, status.name)}: raise {SETTING}"
    return None


def _limit(pod: Any, container: str) -> str:
    for each in pod.spec.containers:
        limits = (each.resources.limits if each.resources else None) or {}
        if each.name == container and "memory" in limits:
            return f"its limit is {limits['memory']}"
    return "it has no limit of its own, its node ran out of memory"


def _disrupted(pod: Any) -> str | None:
    for condition in pod.status.conditions or []:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            said = _DISRUPTED.get(condition.reason, f"was disrupted ({condition.reason})")
            said = said if said.startswith("was ") else f"was {said}"
            return f"{said}: {condition.message}" if pod.status.reason == "Evicted" and condition.message else said
    if pod.status.reason:
        detail = f": {pod.status.message}" if pod.status.message else ""
        advice = f" (`{SETTING}` is what it may count on)" if "memory" in (pod.status.message or "") else ""
        return f"ended as {pod.status.reason}{detail}{advice}"
    return None


def _not_started(pod: Any) -> str | None:
    for status in _statuses(pod):
        waiting = status.state.waiting if status.state else None
        if waiting and waiting.reason in _NOT_STARTED:
            return f"does not start: {waiting.reason} {waiting.message or ''}".rstrip()
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"has no node: {condition.message}"
    return None
