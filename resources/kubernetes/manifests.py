"""Manifests of a training: an Indexed Job with a pod for each machine, and the headless Service of its host names; or a
JobSet with that Job, whose Service its controller makes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resources.kubernetes.settings import Settings
from resources.launch import Launch
from trainer.nodes import NODE_INDEX, NODES, RENDEZVOUS_S

Object = dict[str, Any]

KEY, EXPERIMENT = "triplane/job-key", "triplane/experiment"
"""Labels of Jobs and pods. A label holds 63 of a key's 64 digits; the annotation of this name holds all of them."""
RESTARTS, MESSAGES, RUN = "triplane/restarts", "triplane/messages", "triplane/run"
"""Annotations: restarts so far, folder of the messages in the bucket, Dagster run that created the Job."""
COMPONENT = "trainer"
CONTAINER = "trainer"
QUEUE = "kueue.x-k8s.io/queue-name"
TTL_S = 3600
"""Seconds after which the cluster deletes a finished Job that no driver has read."""
LOST_NODE_S = 30
"""Seconds that a pod stays on a node that does not answer; Kubernetes' default is 300."""
USER = 10001
JOBSETS = "jobset.x-k8s.io/v1alpha2"
"""API of JobSets."""
_SET = "trainer"
"""Name of the only Job in a JobSet, of which there is one replica. Kueue calls its pods so, too."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True)
class Attempt:
    """What tells a Job of a launch from the other ones."""

    restarts: int
    messages: str
    """Folder of the messages in the bucket."""
    run: str
    """Id of the Dagster run."""
    variables: Mapping[str, str]
    """By which the trainer finds the folder."""
    port: int
    """At which rank 0 listens."""


def job_name(key: str) -> str:
    """Name of the Job or JobSet, and of the Service, for an action key."""
    return f"train-{key[:20]}"


def is_set(training: Object) -> bool:
    """Whether this is a JobSet, and not a Job."""
    return bool(training["kind"] == "JobSet")


def pods_job_name(training: Object) -> str:
    """Name of the Job that the pods belong to: the training itself, or the one that the JobSet controller makes."""
    name = str(training["metadata"]["name"])
    return f"{name}-{_SET}-0" if is_set(training) else name


def node_count(training: Object) -> int:
    """How many pods a training has."""
    spec = training["spec"]
    return int((spec["replicatedJobs"][0]["template"]["spec"] if is_set(training) else spec)["parallelism"])


def selector(release: str) -> str:
    """Label selector of all trainers of a release."""
    return f"app.kubernetes.io/component={COMPONENT},app.kubernetes.io/instance={release}"


def training_manifest(launch: Launch, settings: Settings, namespace: str, attempt: Attempt) -> Object:
    """The Job of a launch, or its JobSet, as `placement.trainer.workload` says.

    A JobSet without failurePolicy fails with its Job, so that the launcher decides about restarts of both.
    """
    name, placement = job_name(launch.key), launch.placement
    labels = _labels(launch, settings)
    queue = {QUEUE: placement.queue} if placement.queue else {}
    annotations = {KEY: launch.key, RESTARTS: str(attempt.restarts), MESSAGES: attempt.messages, RUN: attempt.run}
    whole = {"ttlSecondsAfterFinished": TTL_S, **({"suspend": True} if queue else {})}  # Kueue starts it
    job = {
        "completions": launch.nodes,
        "parallelism": launch.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(placement.start_timeout_s + launch.timeout_s) + 1,
        "template": {"metadata": {"labels": labels}, "spec": _pod(launch, settings, attempt)},
    }
    meta = {"name": name, "namespace": namespace, "labels": labels | queue, "annotations": annotations}
    if placement.workload == "job":
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {**job, **whole}}
    jobs = [{"name": _SET, "replicas": 1, "template": {"spec": job}}]
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}  # ranks meet before any pod is ready
    spec = {"replicatedJobs": jobs, "network": network, **whole}
    return {"apiVersion": JOBSETS, "kind": "JobSet", "metadata": meta, "spec": spec}


def service_manifest(job: Object) -> Object:
    """The Service that gives the pods of a Job their host names; it goes with the Job."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": meta["name"],
            "namespace": meta["namespace"],
            "labels": {name: value for name, value in meta["labels"].items() if name != QUEUE},
            "ownerReferences": [owner],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before any pod is ready
            "selector": {"batch.kubernetes.io/job-name": meta["name"]},
        },
    }


def _labels(launch: Launch, settings: Settings) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "triplane",
        "app.kubernetes.io/instance": settings.release,
        "app.kubernetes.io/component": COMPONENT,
        EXPERIMENT: launch.experiment.rstrip("_"),
        KEY: launch.key[:63],
    }


def _pod(launch: Launch, settings: Settings, attempt: Attempt) -> Object:
    placement = launch.placement.pod_fields()
    whole: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "subdomain": job_name(launch.key),
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(launch, settings, attempt)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *_shared_memory(launch)],
        **placement,
        "tolerations": [*placement.get("tolerations", []), *_lost_nodes(placement.get("tolerations", []))],
    }
    if settings.account:
        whole["serviceAccountName"] = settings.account
    if launch.nodes > 1:
        same = {"matchLabels": {KEY: launch.key[:63]}}
        spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        whole["topologySpreadConstraints"] = [{**spread, "labelSelector": same}]
    return whole


def _container(launch: Launch, settings: Settings, attempt: Attempt) -> Object:
    program, *arguments = launch.command
    name = job_name(launch.key)
    host = f"{name}-{_SET}-0" if launch.placement.workload == "jobset" else name
    variables = {
        NODES: str(launch.nodes),
        "MASTER_ADDR": f"{host}-0.{name}",
        "MASTER_PORT": str(attempt.port),
        RENDEZVOUS_S: f"{launch.placement.start_timeout_s:g}",
        "HOME": "/tmp",
        "TRIPLANE_CACHE": "/tmp/triplane-cache",
        "PYTHONUNBUFFERED": "1",
        **attempt.variables,
    }
    index = {"name": NODE_INDEX, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    shared = [{"name": each["name"], "mountPath": "/dev/shm"} for each in _shared_memory(launch)]
    return {
        "name": CONTAINER,
        "image": settings.image,
        # the path of this process's Python means nothing in the image
        "command": ["python" if program == sys.executable else program, *arguments],
        "env": [index, *({"name": name, "value": value} for name, value in variables.items())],
        "envFrom": settings.env_from,
        "resources": launch.placement.resources_with(launch.gpus),
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the trainer's last words
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *shared],
    }


def _shared_memory(launch: Launch) -> list[Object]:
    """NCCL needs more than the 64 MiB that a container has; it counts as memory of the pod."""
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}] if launch.gpus else []


def _lost_nodes(own: Sequence[Mapping[str, str]]) -> list[Object]:
    keys = {each["key"] for each in own}
    taints = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
        for key in taints
        if key not in keys
    ]
