"""The stand-in cluster behaves as Kubernetes does where our launcher and dagster-k8s rely on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from tests.kubernetes.api_server import NAMESPACE, Cluster, serving


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with serving(Cluster(tmp_path / "cluster")) as running:
        config.load_kube_config(str(tmp_path / "cluster" / "kubeconfig.json"))
        yield running


def job(name: str, script: str, count: int = 1, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "app:1", "command": ["bash", "-c", script]}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    return {
        "metadata": {"name": name, "labels": {"app": "one"}},
        "spec": {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
            **spec,
        },
    }


def await_end(name: str) -> client.V1JobStatus:
    deadline = time.monotonic() + 20
    while True:
        status = client.BatchV1Api().read_namespaced_job_status(name, NAMESPACE).status
        if any(each.type in ("Complete", "Failed") for each in status.conditions or []):
            return status
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_indexed_job_runs_its_pods_and_their_logs_can_be_followed(cluster: Cluster) -> None:
    client.BatchV1Api().create_namespaced_job(NAMESPACE, job("two", "echo pod $JOB_COMPLETION_INDEX; sleep 0.5", 2))
    _, second = cluster.await_pods(2)
    read, name = client.CoreV1Api().read_namespaced_pod_log, second["metadata"]["name"]
    log = read(name, NAMESPACE, follow=True, _preload_content=False)  # decoded, release 36 gives "b'...'"
    assert log.data == b"pod 1\n"
    status = await_end("two")
    assert (status.succeeded, status.failed) == (2, 0)
    pods = client.CoreV1Api().list_namespaced_pod(NAMESPACE, label_selector="job-name=two").items
    assert [pod.status.container_statuses[0].state.terminated.exit_code for pod in pods] == [0, 0]


def test_failed_pod_ends_the_others_and_leaves_its_last_words(cluster: Cluster) -> None:
    script = "if [ $JOB_COMPLETION_INDEX = 1 ]; then sleep 0.5; echo boom >&2; exit 7; fi; exec sleep 60"
    client.BatchV1Api().create_namespaced_job(NAMESPACE, job("fails", script, 2))
    status = await_end("fails")
    assert {each.type for each in status.conditions} == {"FailureTarget", "Failed"}
    (pod,) = client.CoreV1Api().list_namespaced_pod(NAMESPACE, label_selector="job-name=fails").items
    ended = pod.status.container_statuses[0].state.terminated
    assert (ended.exit_code, ended.message) == (7, "boom")


def test_deleted_job_takes_its_pods_and_services_along(cluster: Cluster) -> None:
    made = client.BatchV1Api().create_namespaced_job(NAMESPACE, job("gone", "exec sleep 60"))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "gone", "uid": made.metadata.uid}
    service = {"metadata": {"name": "gone", "ownerReferences": [owner]}, "spec": {"clusterIP": "None"}}
    client.CoreV1Api().create_namespaced_service(NAMESPACE, service)
    cluster.await_pods(1)
    with pytest.raises(client.ApiException) as refused:
        client.BatchV1Api().create_namespaced_job(NAMESPACE, job("gone", "true"))
    assert refused.value.status == 409
    client.BatchV1Api().delete_namespaced_job("gone", NAMESPACE, propagation_policy="Foreground")
    deadline = time.monotonic() + 10
    while cluster.jobs() or cluster.pods() or cluster.objects.all("services"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_full_node_and_quota_are_told_in_the_words_of_kubernetes(cluster: Cluster) -> None:
    wanted = job("large", "true")
    wanted["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "16"}}
    client.BatchV1Api().create_namespaced_job(NAMESPACE, wanted)
    (pod,) = cluster.await_pods(1, "Pending")
    time.sleep(0.2)
    assert "Insufficient nvidia.com/gpu" in pod["status"]["conditions"][0]["message"]
    cluster.controllers.pod_quota = 1
    client.BatchV1Api().create_namespaced_job(NAMESPACE, job("second", "true"))
    time.sleep(0.2)
    events = client.CoreV1Api().list_namespaced_event(NAMESPACE, field_selector="involvedObject.name=second").items
    assert [event.reason for event in events] == ["FailedCreate"] and "exceeded quota" in events[0].message


def test_server_that_is_down_closes_connections(cluster: Cluster) -> None:
    cluster.down(0.5)
    with pytest.raises(Exception, match=r"Max retries|Connection|closed"):
        client.BatchV1Api().list_namespaced_job(NAMESPACE, _request_timeout=1)
    time.sleep(0.6)
    assert client.BatchV1Api().list_namespaced_job(NAMESPACE).items == []
