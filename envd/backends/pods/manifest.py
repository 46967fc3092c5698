"""Manifests of a sandbox's pod and of the network policy for all sandboxes."""

from __future__ import annotations

import re
from typing import Any

from envd.backends.base import BoxSpec

SERVER, NETWORK = "triplane.envd/server", "triplane.envd/network"
"""Labels: the server that owns the pod; the network policy that applies."""
POLICY = "envd-sandbox-no-network"
CONTAINER = "sandbox"
USER = 65532
START_S = 120.0
"""Seconds in which a pod must have become a sandbox."""
_GRACE_S = 60.0
_SLACK_MB = 16
"""Memory for the directories of a runtime, beside its files."""


def pod_manifest(
    pod: str,
    spec: BoxSpec,
    *,
    image: str,
    runtime_class: str | None,
    server: str,
    packages: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """Return the manifest of a pod that may only run its agent and the agent's processes.

    server: label of the server that owns the pod. packages: directory where a runtime is mounted, and its bytes.
    """
    limits = spec.limits
    volumes = {"workspace": ("/workspace", limits.disk_mb), "tmp": ("/tmp", limits.disk_mb)}
    memory_mb = limits.memory_mb + limits.disk_mb
    if packages is not None:
        place, size_mb = packages[0], (packages[1] >> 20) + _SLACK_MB
        volumes["packages"], memory_mb = (place, size_mb), memory_mb + size_mb
    # Directories are in memory, so that a full one gives ENOSPC; a disk limit would evict the pod minutes later.
    resources = {"memory": f"{memory_mb}Mi", "cpu": f"{max(10, int(limits.cpu * 1000))}m"}
    container = {
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/sleep", "infinity"],
        "workingDir": "/workspace",
        "resources": {"limits": resources, "requests": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": name, "mountPath": place} for name, (place, _) in volumes.items()],
    }
    whole: dict[str, Any] = {
        "restartPolicy": "Never",
        # the cluster ends the pods of a killed server; it counts from before the image is pulled, a lifetime from after
        "activeDeadlineSeconds": int(START_S + limits.lifetime_s + _GRACE_S),
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": re.sub(r"[^a-z0-9-]", "-", spec.host_name.lower())[:63].strip("-") or "sandbox",
        "securityContext": {"fsGroup": USER},
        "containers": [container],
        "volumes": [
            {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}
            for name, (_, size_mb) in volumes.items()
        ],
    }
    if runtime_class:
        whole["runtimeClassName"] = runtime_class
    labels = {"app.kubernetes.io/managed-by": "envd", SERVER: server, NETWORK: "none"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "labels": labels}, "spec": whole}


def network_policy() -> dict[str, Any]:
    """Return a network policy that denies all traffic, in and out, for pods with the label.

    Takes effect if the cluster's network plugin enforces policies.
    """
    spec = {"podSelector": {"matchLabels": {NETWORK: "none"}}, "policyTypes": ["Ingress", "Egress"]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": POLICY}, "spec": spec}
