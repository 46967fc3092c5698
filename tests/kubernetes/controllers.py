"""Job controller and garbage collector of a stand-in cluster, as in Kubernetes 1.31 and newer: a Job that fails first
gets the condition FailureTarget, its pods are deleted, and when they are gone the condition Failed.
"""

from __future__ import annotations

import copy
import uuid

from tests.kubernetes.jobset_controller import sync_jobset
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.objects import Object, Objects, Refused, now, seconds_since


class Controllers:
    """Reconciles Jobs. pod_quota: how many pods a namespace may have; None: any number."""

    def __init__(self, objects: Objects, kubelet: Kubelet) -> None:
        self.objects, self.kubelet = objects, kubelet
        self.pod_quota: int | None = None
        self._counted: dict[str, set[str]] = {}
        self._failed: dict[str, set[str]] = {}
        self._succeeded: dict[str, dict[str, int]] = {}

    def sync(self) -> None:
        """Take one step with each JobSet, each Job and each object without owner."""
        with self.objects.lock:
            for made in self.objects.all("jobsets"):
                sync_jobset(self.objects, made)
            for job in self.objects.all("jobs"):
                self._sync(job)
            for plural, orphan in list(self.objects.orphans()):
                if plural == "pods":
                    self.kubelet.delete(orphan, None)
                else:
                    self.objects.remove(orphan, plural)

    def _sync(self, job: Object) -> None:
        meta, spec, status = job["metadata"], job["spec"], job.setdefault("status", {})
        pods = self.objects.owned_by("pods", job)
        if "deletionTimestamp" in meta:  # in the foreground: the Job goes after its pods
            for pod in pods:
                self.kubelet.delete(pod, None)
            if not pods:
                self.objects.remove(job, "jobs")
            return
        if _is(job, "Complete") or _is(job, "Failed"):
            ttl = spec.get("ttlSecondsAfterFinished")
            if ttl is not None and seconds_since(status["endedAt"]) > ttl:
                meta["deletionTimestamp"] = now()
            return
        self._count(job, pods)
        active = [pod for pod in pods if pod["metadata"]["uid"] not in self._counted.get(meta["uid"], set())]
        failures, done = self._failed.get(meta["uid"], set()), self._succeeded.get(meta["uid"], {})
        status |= {"active": len(active), "ready": sum(p["status"].get("phase") == "Running" for p in active)}
        status |= {"failed": len(failures), "succeeded": len(done)}
        completions = spec.get("completions", spec.get("parallelism", 1))
        if _is(job, "FailureTarget"):
            if not any(pod["status"].get("phase") in ("Pending", "Running") for pod in pods):
                target = next(each for each in status["conditions"] if each["type"] == "FailureTarget")
                self._end(job, "Failed", target["reason"], target["message"])
        elif len(failures) > spec.get("backoffLimit", 6):
            said = "Job has reached the specified backoff limit"
            self._fail(job, active, "BackoffLimitExceeded", said)
        elif "startTime" in status and seconds_since(status["startTime"]) > spec.get("activeDeadlineSeconds", 1e18):
            self._fail(job, active, "DeadlineExceeded", "Job was active longer than specified deadline")
        elif len(done) >= completions:
            self._end(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        elif spec.get("suspend"):
            status.pop("startTime", None)
            self._counted[meta["uid"]].update(pod["metadata"]["uid"] for pod in active)  # they have not failed
            for pod in active:
                self.kubelet.delete(pod, None)
        else:
            status.setdefault("startTime", now())
            self._start_missing(job, active, completions)

    def _count(self, job: Object, pods: list[Object]) -> None:
        """Count pods that have ended; one that is deleted counts as failed."""
        uid = job["metadata"]["uid"]
        counted = self._counted.setdefault(uid, set())
        for pod in pods:
            own, phase = pod["metadata"]["uid"], pod["status"].get("phase")
            if own in counted or (phase not in ("Succeeded", "Failed") and "deletionTimestamp" not in pod["metadata"]):
                continue
            counted.add(own)
            if phase == "Succeeded":
                self._succeeded.setdefault(uid, {})[_index(pod) or own] = 1
            else:
                self._failed.setdefault(uid, set()).add(own)

    def _fail(self, job: Object, active: list[Object], reason: str, message: str) -> None:
        condition = {"type": "FailureTarget", "status": "True", "reason": reason, "message": message}
        job["status"].setdefault("conditions", []).append(condition)
        self.objects.touch(job)
        for pod in active:
            self.kubelet.delete(pod, None)

    def _end(self, job: Object, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
        job["status"].setdefault("conditions", []).append(condition)
        job["status"] |= {"active": 0, "ready": 0, "endedAt": now()}
        if kind == "Complete":
            job["status"]["completionTime"] = now()
        self.objects.touch(job)

    def _start_missing(self, job: Object, active: list[Object], completions: int) -> None:
        indexed = job["spec"].get("completionMode") == "Indexed"
        done = self._succeeded.get(job["metadata"]["uid"], {})
        taken = {_index(pod) for pod in active} | set(done)
        missing = completions - len(done) - len(active)
        for number in range(completions if indexed else missing):
            if indexed and str(number) in taken:
                continue
            try:
                self._start(job, str(number) if indexed else None)
            except Refused as refusal:
                about = [each["involvedObject"]["uid"] for each in self.objects.all("events")]
                if job["metadata"]["uid"] not in about:
                    self.objects.event(job, "Job", "FailedCreate", f"Error creating: {refusal}")
                return

    def _start(self, job: Object, index: str | None) -> None:
        meta = job["metadata"]
        template = copy.deepcopy(job["spec"]["template"])
        pod = {"kind": "Pod", "apiVersion": "v1", **template, "status": {"phase": "Pending", "conditions": []}}
        own = pod.setdefault("metadata", {})
        name = f"{meta['name']}-{index}-" if index is not None else f"{meta['name']}-"
        own["name"] = name + uuid.uuid4().hex[:5]
        both = {"job-name": meta["name"], "controller-uid": meta["uid"]}
        labels = {**both, **{f"batch.kubernetes.io/{key}": value for key, value in both.items()}}
        own["labels"] = {**own.get("labels", {}), **labels}
        own["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        ]
        if index is not None:
            key = "batch.kubernetes.io/job-completion-index"
            own["labels"][key] = index
            own["annotations"] = {**own.get("annotations", {}), key: index}
            pod["spec"].setdefault("hostname", f"{meta['name']}-{index}")
            for container in pod["spec"]["containers"]:
                field = {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
                container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
        quota = self.pod_quota
        if quota is not None and len(self.objects.all("pods", meta["namespace"])) >= quota:
            said = f'pods "{own["name"]}" is forbidden: exceeded quota: pods, requested: pods=1, limited: pods={quota}'
            raise Refused(403, "Forbidden", said)
        self.objects.create(meta["namespace"], "pods", pod)


def _index(pod: Object) -> str | None:
    found = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
    return None if found is None else str(found)


def _is(job: Object, kind: str) -> bool:
    return any(each["type"] == kind and each["status"] == "True" for each in job["status"].get("conditions", []))
