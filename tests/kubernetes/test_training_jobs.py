"""A real trainer in pods: the same digests as on this machine, also when a pod is taken away."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import boto3
import pytest

from contracts import tracing
from contracts.artifacts import find_artifact
from contracts.digests import digest_of
from contracts.store import Store
from resources.launch import Launch
from resources.placement import TrainerPlacement
from resources.training_logs import kept_logs
from tests.kubernetes.api_server import Cluster
from tests.kubernetes.conftest import messages_left
from tests.kubernetes.kubelet import has_mounts
from tests.kubernetes.trainings import launch_as_job
from tests.otlp import collecting
from tests.trainer.trainer_world import World, make_world
from trainer.config import SftJob

LONG = {"max_steps": 60, "evaluate_every": 5, "snapshot_every": 5, "expected_solve": 1.0}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world")


@pytest.fixture
def remote_world(s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """In a bucket of its own, with a cache that no pod has."""
    for name, value in {**s3, "TRIPLANE_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    bucket = f"stores-{digest_of([tmp_path.name])[:20]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return make_world(tmp_path, f"s3://{bucket}/store")


def launch_of(job: SftJob, store: Store, nodes: int, workload: Literal["job", "jobset"] = "job") -> Launch:
    return Launch(
        [sys.executable, "-m", "trainer", "--job", job.model_dump_json()],
        nodes=nodes,
        timeout_s=120,
        key=job.key,
        experiment="tiny",
        store=store,
        placement=TrainerPlacement(start_timeout_s=60, workload=workload),
        is_done=lambda: find_artifact(store, "checkpoint", job.key) is not None,
    )


def digest_here(job: SftJob) -> str:
    """Digest of the checkpoint that processes of this machine make."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--job", job.model_dump_json()], capture_output=True, text=True, check=True
    )
    return str(json.loads(done.stdout.splitlines()[-1])["checkpoint"]["digest"])


def two_ranks(world: World, name: str, **config: object) -> SftJob:
    return world.sft_job(name, **config).model_copy(update={"ranks": 2, "rank_timeout_s": 20.0})


SHARDED = [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "deepspeed")]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", *SHARDED])
def test_two_pods_train_the_checkpoint_of_two_local_ranks(world: World, cluster: Cluster, backend: str) -> None:
    here, job = (two_ranks(world, name).model_copy(update={"backend": backend}) for name in ("here", "pods"))
    expected = digest_here(here)
    messages = launch_as_job(launch_of(job, world.store, 2))
    assert messages[-1]["result"]["checkpoint"]["digest"] == expected
    assert any("loss" in message.get("metrics", {}) for message in messages)
    folder = Path(kept_logs(world.store, job.key))
    logs = sorted(path.name for path in folder.rglob("*.log"))
    assert [name[:28] for name in logs] == [f"train-{job.key[:20]}-{index}" for index in (0, 1)]
    assert messages_left() == []


@pytest.mark.slow
@pytest.mark.skipif(not has_mounts(), reason="pods would see the disks of each other")
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_two_pods_without_a_common_disk_train_the_checkpoint_of_two_local_ranks(
    remote_world: World, cluster: Cluster, backend: str
) -> None:
    store = remote_world.store
    here, job = (two_ranks(remote_world, name).model_copy(update={"backend": backend}) for name in ("here", "pods"))
    expected = digest_here(here)
    assert launch_as_job(launch_of(job, store, 2))[-1]["result"]["checkpoint"]["digest"] == expected
    local, remote = (find_artifact(store, "trainer_state", each.key) for each in (here, job))
    assert local is not None and remote is not None and local.ref.digest == remote.ref.digest
    assert len(list(cluster.kubelet.disk.iterdir())) == 2, "each pod wrote to a disk of its own"


@pytest.mark.slow
def test_the_pods_of_a_jobset_train_the_checkpoint_of_two_local_ranks(world: World, cluster: Cluster) -> None:
    cluster.has_jobsets = True
    here, job = (two_ranks(world, name) for name in ("here", "pods"))
    messages = launch_as_job(launch_of(job, world.store, 2, "jobset"))
    assert messages[-1]["result"]["checkpoint"]["digest"] == digest_here(here)


def test_one_pod_reports_its_progress_and_its_result_and_is_told_the_trace(
    world: World, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = world.sft_job("one")
    with collecting(monkeypatch) as found:
        cluster.kubelet.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = found.url
        with tracing.span("step"):
            messages = launch_as_job(launch_of(job, world.store, 1))
        tracing.flush()
        assert messages[-1]["result"]["checkpoint"]["key"] == job.key
        assert [found.path(span) for span in found.named("export")] == [["step", "train", "export"]]


@pytest.mark.slow
def test_a_killed_rank_resumes_from_its_snapshot_with_the_same_checkpoint(world: World, cluster: Cluster) -> None:
    expected = digest_here(two_ranks(world, "undisturbed", **LONG))
    job = two_ranks(world, "killed", **LONG)
    killed: list[str] = []

    def kill() -> None:
        pods = cluster.await_pods(2)
        while "expected_solve" not in cluster.log_of(pods[0]):
            threading.Event().wait(0.05)
        cluster.kubelet.kill(pods[1])
        killed.append(pods[1]["metadata"]["name"])

    thread = threading.Thread(target=kill)
    thread.start()
    messages = launch_as_job(launch_of(job, world.store, 2))
    thread.join()
    assert killed and messages[-1]["result"]["checkpoint"]["digest"] == expected
    folders = sorted(path.name[:2] for path in Path(kept_logs(world.store, job.key)).iterdir())
    assert folders == ["0-", "1-"]
