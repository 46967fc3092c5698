"""Create, adopt and remove the Job or JobSet of a training. Its name is the action key's, so there is one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from resources.errors import LaunchFailed
from resources.kubernetes.client import Api, ApiFault
from resources.kubernetes.manifests import (
    KEY,
    MESSAGES,
    RESTARTS,
    is_set,
    job_name,
    pods_job_name,
    service_manifest,
)

Object = dict[str, Any]

_POLL_S = 0.5
_FORCE_S, _GIVE_UP_S = 45.0, 120.0
"""Seconds after which pods of a deleted Job are removed by force, and after which the launcher gives up."""


def existing_training(api: Api, key: str, poll_s: float, *, sets: bool) -> Object | None:
    """Job or JobSet of a training, whoever created it; waits for the end of one that is being deleted.

    Both kinds are looked for: `placement.trainer.workload` may have changed while a training lives. sets: whether it
    is jobset now. Raises LaunchFailed if it is another training's.
    """
    name = job_name(key)
    found = api.training("Job", name) or _of_sets(sets, lambda: api.training("JobSet", name))
    if found is None:
        return None
    if "deletionTimestamp" in found["metadata"]:
        await_deletion(api, found, poll_s)
        return existing_training(api, key, poll_s, sets=sets)
    annotations = found["metadata"].get("annotations") or {}
    if annotations.get(KEY) != key or MESSAGES not in annotations:
        raise LaunchFailed(
            f"{found['kind']} {name} in the namespace {api.namespace} is not the training {key[:12]} (annotation"
            f" {KEY}): delete it"
        )
    return found


def all_trainings(api: Api, labels: str, patience_s: float, *, sets: bool) -> list[Object]:
    """Jobs and JobSets that match a label selector. sets: whether an experiment of this deployment asks for JobSets."""
    found = _of_sets(sets, lambda: api.trainings("JobSet", labels, patience_s))
    return [*api.trainings("Job", labels, patience_s), *(found or [])]


def _of_sets(wanted: bool, ask: Callable[[], Any]) -> Any:
    """What a request for JobSets finds. If none are wanted, a refusal says that this deployment has none: None."""
    try:
        return ask()
    except ApiFault as fault:
        if wanted or fault.status not in (403, 404):
            raise
        return None


def restarts_of(training: Object) -> int:
    """How often a training was restarted before this Job or JobSet."""
    return int(training["metadata"]["annotations"].get(RESTARTS, "0"))


def ensure_service(api: Api, training: Object) -> None:
    """Create the Job's Service. One of an earlier Job, which the cluster is about to delete, is replaced.

    The controller of JobSets makes theirs. Raises LaunchFailed.
    """
    if is_set(training):
        return
    wanted = service_manifest(training)
    name, uid = wanted["metadata"]["name"], training["metadata"]["uid"]
    for _ in range(20):
        if api.create_service(wanted) is not None:
            return
        found = api.service(name)
        if found is not None:
            if is_owned(found, uid):
                return
            api.delete_service(found)
        time.sleep(_POLL_S)
    raise LaunchFailed(f"Service {name} in the namespace {api.namespace} is not the training's: delete it")


def is_owned(whole: Object, uid: str) -> bool:
    """Whether the object with this uid owns another one."""
    return any(owner["uid"] == uid for owner in whole["metadata"].get("ownerReferences") or [])


def remove_training(api: Api, training: Object, poll_s: float) -> None:
    """Delete a Job or JobSet and wait until it and its pods are gone. Raises LaunchFailed."""
    api.delete_training(training)
    await_deletion(api, training, poll_s)


def await_deletion(api: Api, training: Object, poll_s: float) -> None:
    """Wait until a deleted training is gone; pods on nodes that do not answer are removed by force.

    Raises LaunchFailed.
    """
    kind, name, uid = training["kind"], training["metadata"]["name"], training["metadata"]["uid"]
    begun = time.monotonic()
    forced = False
    while True:
        found = api.training(kind, name)
        if found is None or found["metadata"]["uid"] != uid:
            return
        waited = time.monotonic() - begun
        if waited > _GIVE_UP_S:
            raise LaunchFailed(
                f"{kind} {name} in the namespace {api.namespace} was deleted {waited:.0f} s ago and is still there: see"
                f" `kubectl describe {kind.lower()} {name}`"
            )
        if waited > _FORCE_S and not forced:
            forced = True
            for pod in api.pods(f"batch.kubernetes.io/job-name={pods_job_name(training)}"):
                api.force_delete_pod(pod)
        time.sleep(poll_s)
