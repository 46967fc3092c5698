"""What our run launcher says of a run's pod to Dagster's run monitoring, and how faults of pods are told."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

pytest.importorskip("dagster_k8s")
from kubernetes.client import (
    V1Container,
    V1ContainerState,
    V1ContainerStateTerminated,
    V1ContainerStateWaiting,
    V1ContainerStatus,
    V1ObjectMeta,
    V1Pod,
    V1PodCondition,
    V1PodSpec,
    V1PodStatus,
    V1ResourceRequirements,
)

from tests.kubernetes.api_server import NAMESPACE, Cluster, serving
from triplane_dagster import run_pods
from triplane_dagster.dead_runs import end_dead_runs
from triplane_dagster.pod_faults import faults_of, pod_fault
from triplane_dagster.private_dagster import CheckStepHealthResult, WorkerStatus
from triplane_dagster.run_pods import RunPodLauncher
from triplane_dagster.step_pods import _NamedFaults

RUN = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with serving(Cluster(tmp_path / "cluster")) as running:
        yield running


@pytest.fixture
def launcher(cluster: Cluster) -> Iterator[RunPodLauncher]:
    made = RunPodLauncher(
        service_account_name="runs",
        instance_config_map="instance",
        dagster_home="/tmp",
        job_namespace=NAMESPACE,
        load_incluster_config=False,
        kubeconfig_file=str(cluster.folder / "kubeconfig.json"),
    )
    with dg.DagsterInstance.ephemeral() as instance:
        made.register_instance(instance)
        yield made


def starting(launcher: RunPodLauncher, monkeypatch: pytest.MonkeyPatch) -> dg.DagsterInstance:
    """The launcher's instance, with a run that is being launched."""
    instance = launcher._instance
    monkeypatch.setattr(type(instance), "run_launcher", property(lambda _: launcher))
    instance.add_run(dg.DagsterRun(job_name="tiny_base", run_id=RUN))
    instance.report_dagster_event(dg.DagsterEvent(dg.DagsterEventType.RUN_STARTING.value, "tiny_base"), RUN)
    return instance


def started() -> dg.DagsterRun:
    return dg.DagsterRun(job_name="tiny_base", run_id=RUN, status=dg.DagsterRunStatus.STARTED)


def job(name: str, seconds: str) -> dict[str, Any]:
    labels = {"dagster/run-id": RUN}
    pod = {"restartPolicy": "Never", "containers": [{"name": "dagster", "image": "a:1", "command": ["sleep", seconds]}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"backoffLimit": 0, "template": template}}


def test_an_api_server_that_does_not_reply_ends_no_run(cluster: Cluster, launcher: RunPodLauncher) -> None:
    cluster.add("jobs", job(f"dagster-run-{RUN}", "60"))
    cluster.await_pods(1)
    assert launcher.check_run_worker_health(started()).status is WorkerStatus.RUNNING
    cluster.down(60)
    found = launcher.check_run_worker_health(started())
    assert found.status is WorkerStatus.RUNNING and "does not reply: checking again later" in found.msg


def test_a_run_whose_pod_died_before_it_began_ends_at_the_next_look(
    cluster: Cluster, launcher: RunPodLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = launcher._instance
    monkeypatch.setattr(type(instance), "run_launcher", property(lambda _: launcher))
    starting = {"job_name": "tiny_base", "status": dg.DagsterRunStatus.STARTING}
    instance.add_run(dg.DagsterRun(run_id=RUN, **starting))
    instance.add_run(dg.DagsterRun(run_id=RUN.replace("1", "2"), **starting))  # its Job is not made yet
    cluster.add("jobs", job(f"dagster-run-{RUN}", "60"))
    (pod,) = cluster.await_pods(1)
    assert end_dead_runs(instance) == []
    cluster.kubelet.kill(pod)
    cluster.await_pods(1, "Failed")
    deadline = time.monotonic() + 30
    while end_dead_runs(instance) != [RUN]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [run.run_id for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE]))] == [RUN]
    assert end_dead_runs(instance) == []


def unschedulable(name: str) -> dict[str, Any]:
    made = job(name, "60")
    made["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "16"}}
    return made


def await_event(cluster: Cluster) -> None:
    deadline = time.monotonic() + 30
    while not cluster.objects.all("events"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_whose_pod_finds_no_node_fails_with_the_words_of_the_scheduler(
    cluster: Cluster, launcher: RunPodLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = starting(launcher, monkeypatch)
    cluster.add("jobs", unschedulable(f"dagster-run-{RUN}"))
    await_event(cluster)
    assert end_dead_runs(instance) == [], "it has time"
    monkeypatch.setattr(type(instance), "run_monitoring_start_timeout_seconds", property(lambda _: 0.5))
    time.sleep(0.5)
    assert end_dead_runs(instance) == [RUN] and cluster.jobs() == []
    (entry,) = instance.all_logs(RUN, of_type=dg.DagsterEventType.RUN_FAILURE)
    failed = entry.get_dagster_event()
    assert "has no node: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu" in (failed.message or "")


def test_a_run_whose_launch_was_cut_off_before_its_job_was_made_fails_soon(
    launcher: RunPodLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = starting(launcher, monkeypatch)
    assert end_dead_runs(instance) == [], "its Job may be made at this moment"
    monkeypatch.setattr(run_pods, "LAUNCH_S", 0.2)
    time.sleep(0.3)
    assert end_dead_runs(instance) == [RUN] and end_dead_runs(instance) == []
    (entry,) = instance.all_logs(RUN, of_type=dg.DagsterEventType.RUN_FAILURE)
    why = r"has no Job \d+ s after its launch: the daemon that launched it has ended"
    assert re.search(why, entry.get_dagster_event().message or "")


def test_an_api_server_that_does_not_reply_cuts_off_no_launch(
    cluster: Cluster, launcher: RunPodLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = starting(launcher, monkeypatch)
    monkeypatch.setattr(run_pods, "LAUNCH_S", 0.0)
    cluster.down(60)
    assert end_dead_runs(instance) == []


class StepOf:
    """What dagster-k8s' step handler knows of a step: its Job."""

    def __init__(self, launcher: RunPodLauncher, name: str) -> None:
        self._api_client, self._name = launcher._api_client, name

    def _get_k8s_step_job_name(self, _: Any) -> str:
        return self._name

    def _get_container_context(self, _: Any) -> Any:
        return SimpleNamespace(namespace=NAMESPACE)

    def check_step_health(self, _: Any) -> CheckStepHealthResult:
        return CheckStepHealthResult.healthy()


def test_a_step_whose_pod_does_not_start_is_ended_in_the_words_of_the_cluster(
    cluster: Cluster, launcher: RunPodLauncher
) -> None:
    context: Any = SimpleNamespace(instance=SimpleNamespace(run_monitoring_start_timeout_seconds=0.5))
    cluster.controllers.pod_quota = 2
    cluster.add("jobs", job("dagster-step-one", "60"))
    cluster.await_pods(1)
    cluster.add("jobs", unschedulable("dagster-step-two"))
    await_event(cluster)
    cluster.add("jobs", job("dagster-step-three", "60"))  # beyond the quota
    handlers = {name: _NamedFaults(StepOf(launcher, f"dagster-step-{name}")) for name in ("one", "three", "two")}
    said = {}
    for _ in range(2):
        said = {name: each.check_step_health(context) for name, each in handlers.items()}
        time.sleep(0.6)
    assert said["one"].is_healthy, "it runs"
    assert "has no node: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu" in said["two"].unhealthy_reason
    assert "exceeded quota: pods" in said["three"].unhealthy_reason
    assert [each["metadata"]["name"] for each in cluster.jobs()] == ["dagster-step-one"]


def test_a_lost_run_pod_is_told_and_takes_its_steps_along(cluster: Cluster, launcher: RunPodLauncher) -> None:
    cluster.add("jobs", job(f"dagster-run-{RUN}", "60"))
    cluster.add("jobs", job("dagster-step-one", "60"))
    other = job("dagster-step-other", "60")
    other["metadata"]["labels"] = {"dagster/run-id": RUN.replace("1", "9")}
    cluster.add("jobs", other)
    pods = {each["metadata"]["labels"]["job-name"]: each for each in cluster.await_pods(3)}
    cluster.kubelet.kill(pods[f"dagster-run-{RUN}"], reason="OOMKilled")
    cluster.await_pods(1, "Failed")
    deadline = time.monotonic() + 30
    while (found := launcher.check_run_worker_health(started())).status is not WorkerStatus.FAILED:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "was killed for memory: it has no limit of its own, its node ran out of memory" in found.msg
    assert {each["metadata"]["name"] for each in cluster.jobs()} == {f"dagster-run-{RUN}", "dagster-step-other"}


def test_a_run_whose_job_was_deleted_has_failed(launcher: RunPodLauncher) -> None:
    found = launcher.check_run_worker_health(started())
    assert found.status is WorkerStatus.FAILED and f"dagster-run-{RUN} could not be found" in found.msg


def pod(**status: Any) -> V1Pod:
    limits = V1ResourceRequirements(limits={"memory": "768Mi"})
    spec = V1PodSpec(containers=[V1Container(name="dagster", resources=limits)])
    return V1Pod(metadata=V1ObjectMeta(name="p"), spec=spec, status=V1PodStatus(**status))


def container(**state: Any) -> V1ContainerStatus:
    now = V1ContainerState(**state)
    return V1ContainerStatus(name="dagster", image="a", image_id="", ready=False, restart_count=0, state=now)


OOM = V1ContainerStateTerminated(exit_code=137, reason="OOMKilled")
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "message": "said"}


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        (
            pod(container_statuses=[container(terminated=OOM)]),
            "was killed for memory: its limit is 768Mi: raise placement.steps.memory",
        ),
        (
            pod(reason="Evicted", message="The node was low on resource: memory."),
            "ended as Evicted: The node was low on resource: memory."
            " (`placement.steps.memory` is what it may count on)",
        ),
        (
            pod(conditions=[V1PodCondition(**DISRUPTED, reason="PreemptionByScheduler")]),
            "was preempted by a pod of higher priority (`placement.steps.priority_class`)",
        ),
        (
            pod(conditions=[V1PodCondition(**DISRUPTED, reason="DeletionByTaintManager")]),
            "was deleted with its node, which was lost or tainted",
        ),
        (
            pod(
                container_statuses=[
                    container(waiting=V1ContainerStateWaiting(reason="ImagePullBackOff", message='pulling "a:1"'))
                ]
            ),
            'does not start: ImagePullBackOff pulling "a:1"',
        ),
        (
            pod(conditions=[V1PodCondition(type="PodScheduled", status="False", message="0/3 nodes are available")]),
            "has no node: 0/3 nodes are available",
        ),
    ],
)
def test_a_fault_of_a_pod_is_told_in_words(lost: V1Pod, words: str) -> None:
    assert pod_fault(lost) == words and faults_of([lost]) == f"pod p {words}"


def test_an_exit_code_alone_is_no_fault_of_a_pod() -> None:
    ended = pod(container_statuses=[container(terminated=V1ContainerStateTerminated(exit_code=1, reason="Error"))])
    assert pod_fault(ended) is None and faults_of([ended]) == ""
