"""Create, adopt and remove the Job of a training. Its name is that of the action key, so there is one at a time."""

from __future__ import annotations

import time
from typing import Any

from resources.errors import LaunchFailed
from resources.kubernetes.client import Api
from resources.kubernetes.manifests import KEY, MESSAGES, RESTARTS, job_name, service_manifest

Object = dict[str, Any]

_POLL_S = 0.5
_FORCE_S, _GIVE_UP_S = 45.0, 120.0
"""Seconds after which pods of a deleted Job are removed by force, and after which the launcher gives up."""


def existing_job(api: Api, key: str) -> Object | None:
    """The Job of a training, whoever created it; waits for the end of one that is being deleted.

    Raises LaunchFailed if it is another training's.
    """
    name = job_name(key)
    found = api.job(name)
    if found is not None and "deletionTimestamp" in found["metadata"]:
        await_deletion(api, found)
        found = api.job(name)
    if found is None:
        return None
    annotations = found["metadata"].get("annotations") or {}
    if annotations.get(KEY) != key or MESSAGES not in annotations:
        raise LaunchFailed(
            f"Job {name} in the namespace {api.namespace} is not the training {key[:12]} (annotation {KEY}): delete it"
        )
    return found


def restarts_of(job: Object) -> int:
    """How often a training was restarted before this Job."""
    return int(job["metadata"]["annotations"].get(RESTARTS, "0"))


def ensure_service(api: Api, job: Object) -> None:
    """Create the Job's Service. One of an earlier Job, which the cluster is about to delete, is replaced.

    Raises LaunchFailed.
    """
    wanted = service_manifest(job)
    name, uid = wanted["metadata"]["name"], job["metadata"]["uid"]
    for _ in range(20):
        if api.create_service(wanted) is not None:
            return
        found = api.service(name)
        if found is not None:
            owners = found["metadata"].get("ownerReferences") or []
            if any(owner["uid"] == uid for owner in owners):
                return
            api.delete_service(found)
        time.sleep(_POLL_S)
    raise LaunchFailed(f"Service {name} in the namespace {api.namespace} is not the training's: delete it")


def remove_job(api: Api, job: Object) -> None:
    """Delete a Job and wait until it and its pods are gone. Raises LaunchFailed."""
    api.delete_job(job, foreground=True)
    await_deletion(api, job)


def await_deletion(api: Api, job: Object) -> None:
    """Wait until a deleted Job is gone; pods on nodes that do not answer are removed by force. Raises LaunchFailed."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    begun = time.monotonic()
    forced = False
    while True:
        found = api.job(name)
        if found is None or found["metadata"]["uid"] != uid:
            return
        waited = time.monotonic() - begun
        if waited > _GIVE_UP_S:
            raise LaunchFailed(
                f"Job {name} in the namespace {api.namespace} was deleted {waited:.0f} s ago and is still there: see"
                f" `kubectl describe job {name}`"
            )
        if waited > _FORCE_S and not forced:
            forced = True
            for pod in api.pods(f"batch.kubernetes.io/job-name={name}"):
                api.force_delete_pod(pod)
        time.sleep(_POLL_S)
