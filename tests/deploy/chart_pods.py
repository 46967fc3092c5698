"""Pods of the chart: those that it makes itself, and the Jobs that Dagster makes from the instance in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import yaml
from dagster import DagsterRun
from dagster._config import process_config, resolve_to_config_type
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import construct_dagster_k8s_job
from dagster_k8s.launcher import K8sRunLauncher

Object = dict[str, Any]

FULL: Object = {
    "imagePullSecrets": ["registry"],
    "store": {"createBuckets": True},
    "s3": {"server": {"enabled": True}},
    "extraEnv": {"OMP_NUM_THREADS": "1"},
    "experiments": {"configMap": "night"},
    "runs": {"executor": "k8s", "pool": {"replicas": 2}},
    "samplers": [{"experiment": "quickstart", "replicas": 2}, {"experiment": "my_night"}],
    "engines": [
        {
            "experiment": "qwen3-4b",
            "replicas": 2,
            "gpus": 2,
            "image": "vllm/vllm-openai:v0.32.0",
            "first": "3f9c2a71",
            "scale": True,
            "eventsPort": 5557,
        }
    ],
    "redis": {"enabled": True, "existingSecret": "triplane-redis"},
    "routers": [
        {
            "experiment": "quickstart",
            "to": "samplers",
            "replicas": 2,
            "keySecret": "triplane-fleet",
            "webhookSecret": "triplane-webhook",
        },
        {"experiment": "qwen3-4b", "to": "engines", "servers": ["http://10.0.0.7:8000"], "timeoutSeconds": 60},
    ],
    "bridges": [
        {"experiment": "quickstart", "keySecret": "triplane-bridge"},
        {
            "experiment": "my_night",
            "keySecret": "triplane-bridge",
            "tlsSecret": "triplane-bridge-tls",
            "clientCertificates": True,
            "policy": "base",
            "policyClaim": "trainer",
            "set": ["engine.kind=openai", "engine.base_url=http://night-router-quickstart:8080/v1"],
            "envSecret": "triplane-bridge-variables",
            "journal": {"ephemeral": True},
        },
    ],
    "envd": {"metrics": True},
    "trainer": {"jobset": True, "image": {"repository": "registry.example.com/trainer", "tag": "0.1.0"}},
}
"""Values that make every kind of object."""

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: none, user: {}}]
"""


def templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name and pod template of each Deployment, StatefulSet, DaemonSet and Job."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]


def instance(objects: list[Object]) -> Object:
    """The rendered dagster.yaml."""
    (found,) = [each for each in objects if each["kind"] == "ConfigMap" and "dagster.yaml" in each["data"]]
    read: Object = yaml.safe_load(found["data"]["dagster.yaml"])
    return read


def environment(objects: list[Object]) -> dict[str, str]:
    """The variables that all pods of Triplane have."""
    (found,) = [each for each in objects if each["kind"] == "ConfigMap" and "TRIPLANE_STORE" in each["data"]]
    return dict(found["data"])


def run_job(objects: list[Object], folder: Path, tags: dict[str, str] | None = None) -> Object:
    """The Job that Dagster's own launcher makes for a run with these tags. folder: for a file of its."""
    (folder / "kubeconfig").write_text(KUBECONFIG)
    given = {
        **instance(objects)["run_launcher"]["config"],
        "load_incluster_config": False,
        "kubeconfig_file": str(folder / "kubeconfig"),
    }
    checked = process_config(resolve_to_config_type(K8sRunLauncher.config_type()), given)
    assert checked.success, checked.errors
    launcher = K8sRunLauncher.from_config_value(None, checked.value)
    context = K8sContainerContext.create_for_run(DagsterRun("train", tags=tags or {}), launcher, include_run_tags=True)
    job = construct_dagster_k8s_job(
        context.get_k8s_job_config(None, launcher),
        args=["dagster", "api", "execute_run"],
        job_name="dagster-run-1",
        component="run_worker",
        user_defined_k8s_config=context.run_k8s_config,
    )
    made: Object = kubernetes.client.ApiClient().sanitize_for_serialization(job)
    return made
