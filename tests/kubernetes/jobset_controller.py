"""JobSet controller of a stand-in cluster, as in JobSet 0.12 (kubernetes-sigs/jobset): what our JobSets need of it.

A JobSet makes a headless Service of its name, and each Job `SET-NAME-INDEX`; it completes with its Jobs, and fails with
the first one that fails, since it has no failurePolicy. Suspending it suspends its Jobs, which is how Kueue admits.
"""

from __future__ import annotations

import copy

from tests.kubernetes.objects import Object, Objects, Refused, now, seconds_since

API = "jobset.x-k8s.io/v1alpha2"
_LABEL = "jobset.sigs.k8s.io/"


def admitted(body: Object) -> Object:
    """A JobSet with the defaults of its webhook. Raises Refused for what that, or this stand-in, does not take."""
    spec = body["spec"]
    if body.get("apiVersion") != API:
        raise Refused(400, "BadRequest", f"the API version in the data ({body.get('apiVersion')}) is not {API}")
    if "failurePolicy" in spec:
        raise Refused(422, "Invalid", "spec.failurePolicy: this stand-in knows none")
    for each in spec["replicatedJobs"]:
        job = each["template"]["spec"]
        pod = f"{body['metadata']['name']}-{each['name']}-{each.get('replicas', 1) - 1}-{job['completions'] - 1}-abcde"
        if len(pod) > 63:
            raise Refused(
                422, "Invalid", "JobSet name is too long, pod names generated for it will exceed 63 characters"
            )
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, **spec.get("network", {})}
    return {**body, "spec": {**spec, "network": network}, "status": {}}


def sync_jobset(objects: Objects, made: Object) -> None:
    """Take one step with a JobSet."""
    meta, spec = made["metadata"], made["spec"]
    jobs, services = objects.owned_by("jobs", made), objects.owned_by("services", made)
    if "deletionTimestamp" in meta:  # in the foreground: the JobSet goes after its Jobs
        for job in jobs:
            job["metadata"].setdefault("deletionTimestamp", now())
        for service in services:
            objects.remove(service, "services")
        if not jobs:
            objects.remove(made, "jobsets")
        return
    ended = next(
        (each for each in made["status"].get("conditions", []) if each["type"] in ("Completed", "Failed")), None
    )
    if ended is not None:
        if seconds_since(ended["lastTransitionTime"]) > spec.get("ttlSecondsAfterFinished", 1e18):
            meta["deletionTimestamp"] = now()
        return
    failed = [job for job in jobs if _has(job, "Failed")]
    if failed:
        said = f"jobset failed due to one or more job failures (first failed job: {failed[0]['metadata']['name']})"
        _end(objects, made, "Failed", "FailedJobs", said)
    elif jobs and all(_has(job, "Complete") for job in jobs):
        _end(objects, made, "Completed", "AllJobsCompleted", "jobset completed successfully")
    else:
        if not services:
            _create(objects, "services", made, {"metadata": {"name": meta["name"]}, "spec": {"clusterIP": "None"}})
        _make_jobs(objects, made, jobs)


def _make_jobs(objects: Objects, made: Object, jobs: list[Object]) -> None:
    meta, spec = made["metadata"], made["spec"]
    names = {job["metadata"]["name"] for job in jobs}
    for job in jobs:
        job["spec"]["suspend"] = bool(spec.get("suspend"))
    for each in spec["replicatedJobs"]:
        for index in range(each.get("replicas", 1)):
            name = f"{meta['name']}-{each['name']}-{index}"
            if name in names:
                continue
            own = {"jobset-name": meta["name"], "replicatedjob-name": each["name"], "job-index": str(index)}
            labels = {f"{_LABEL}{key}": value for key, value in {**own, "restart-attempt": "0"}.items()}
            job = copy.deepcopy(each["template"])
            job["spec"]["suspend"] = bool(spec.get("suspend"))
            for labelled in (job, job["spec"]["template"]):
                head = labelled.setdefault("metadata", {})
                head["labels"] = {**head.get("labels", {}), **labels}
                head["annotations"] = {**head.get("annotations", {}), **labels}
            job["spec"]["template"]["spec"]["subdomain"] = spec["network"].get("subdomain", meta["name"])
            job["metadata"]["name"] = name
            _create(objects, "jobs", made, {**job, "status": {}})


def _create(objects: Objects, plural: str, owner: Object, made: Object) -> None:
    meta = owner["metadata"]
    made["metadata"]["ownerReferences"] = [
        {"apiVersion": API, "kind": "JobSet", "name": meta["name"], "uid": meta["uid"], "controller": True}
    ]
    try:
        objects.create(meta["namespace"], plural, made)
    except Refused as refusal:
        reason = "JobCreationFailed" if plural == "jobs" else "HeadlessServiceCreationFailed"
        if reason not in {each["reason"] for each in objects.all("events")}:
            objects.event(owner, "JobSet", reason, str(refusal))


def _has(job: Object, kind: str) -> bool:
    return any(each["type"] == kind for each in job["status"].get("conditions", []))


def _end(objects: Objects, made: Object, kind: str, reason: str, message: str) -> None:
    condition = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
    made["status"] = {"conditions": [condition], "terminalState": kind, "restarts": 0}
    objects.touch(made)
