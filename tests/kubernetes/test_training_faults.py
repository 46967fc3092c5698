"""What the launcher does when pods fail, are taken away or can't start, and what it says."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.digests import digest_of
from contracts.errors import ConfigError
from contracts.store import open_store
from resources.channel import PIPES_BUCKET
from resources.errors import LaunchFailed
from resources.kubernetes.client import Api, ApiUnreachable
from resources.kubernetes.settings import ENVIRONMENT, IMAGE
from resources.launch import Launch
from resources.placement import TrainerPlacement
from resources.training_logs import kept_logs
from tests.kubernetes.api_server import Cluster
from tests.kubernetes.conftest import messages_left
from tests.kubernetes.trainings import launch_as_job

pytestmark = pytest.mark.slow

SECOND = "if [ $TRIPLANE_NODE_INDEX = 1 ]; then"


def script(tmp_path: Path, text: str, **options: Any) -> Launch:
    """A launch of a shell script."""
    placement = TrainerPlacement(**{"start_timeout_s": 60, **options.pop("placement", {})})
    key, store = digest_of([text, str(tmp_path)]), open_store(str(tmp_path / "store"))
    whole = {"key": key, "experiment": "tiny", "store": store, "placement": placement, "timeout_s": 60, **options}
    return Launch(["bash", "-c", text], **whole)


def created(cluster: Cluster) -> int:
    """How many Jobs and JobSets were created by clients."""
    return sum(method == "POST" and path.endswith(("/jobs", "/jobsets")) for method, path in cluster.requests)


def meanwhile(cluster: Cluster, act: Callable[[dict[str, Any]], object], count: int = 1) -> threading.Thread:
    """Do something to the last of `count` running pods, a moment after all of them have started."""

    def wait_and_act() -> None:
        pods = cluster.await_pods(count)
        time.sleep(0.4)
        act(pods[-1])

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


def fails_once(folder: Path, then: str = "exec sleep 60") -> str:
    """A script whose first attempt does not end, and whose second one succeeds."""
    return f"if mkdir {folder}/tried 2>/dev/null; then {then}; fi; echo went on"


@pytest.mark.parametrize(
    ("status", "said"), [(1, "ended with code 1"), (2, "the job is malformed"), (4, "training diverged")]
)
def test_a_rank_that_fails_for_a_reason_of_its_own_decides(
    cluster: Cluster, tmp_path: Path, status: int, said: str
) -> None:
    launch = script(
        tmp_path,
        f"{SECOND} sleep 0.6; echo noise; echo 'trainer: the loss is not finite'; exit {status}; fi; sleep 1; exit 3",
        nodes=2,
    )
    with pytest.raises(LaunchFailed, match=rf"{said}: trainer: the loss is not finite; logs: .*/logs/training/"):
        launch_as_job(launch)
    assert created(cluster) == 1 and messages_left() == []


def test_out_of_memory_names_the_limit_and_the_setting(cluster: Cluster, tmp_path: Path) -> None:
    thread = meanwhile(cluster, lambda pod: cluster.kubelet.kill(pod, signal.SIGKILL, "OOMKilled"))
    with pytest.raises(LaunchFailed, match=r"memory limit of 3Gi \(OOMKilled\): raise placement\.trainer\.memory"):
        launch_as_job(script(tmp_path, "exec sleep 60", placement={"memory": "3Gi"}))
    thread.join()
    assert created(cluster) == 1


@pytest.mark.parametrize("fault", ["kill -9", "eviction", "deletion"])
def test_a_pod_that_is_taken_away_is_replaced(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    acts: dict[str, Callable[[dict[str, Any]], object]] = {
        "kill -9": cluster.kubelet.kill,
        "eviction": lambda pod: cluster.kubelet.disrupt(pod, "EvictionByEvictionAPI", "node is drained"),
        "deletion": lambda pod: cluster.kubelet.delete(pod, None),
    }
    thread = meanwhile(cluster, acts[fault], 2)
    launch = script(tmp_path, f"{SECOND} {fails_once(tmp_path)}; fi; sleep 1", nodes=2)
    launch_as_job(launch)
    thread.join()
    assert created(cluster) == 2
    assert launch.store is not None
    folders = sorted(Path(kept_logs(launch.store, launch.key)).iterdir())
    assert [folder.name[:2] for folder in folders] == ["0-", "1-"]
    assert "went on\n" in [path.read_text() for path in folders[1].iterdir()]


def test_a_pod_on_a_lost_node_is_removed_by_force(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.kubernetes.jobs._FORCE_S", 1.0)
    thread = meanwhile(cluster, cluster.kubelet.lose)
    launch_as_job(script(tmp_path, fails_once(tmp_path)))
    thread.join()
    assert created(cluster) == 2


def test_a_training_is_restarted_three_times_at_most(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"after 3 restart\(s\): pod .* was killed \(SIGKILL\)"):
        launch_as_job(script(tmp_path, "sleep 0.2; kill -9 $$"))
    assert created(cluster) == 4


def test_ranks_that_only_lost_another_one_are_restarted(cluster: Cluster, tmp_path: Path) -> None:
    launch_as_job(script(tmp_path, fails_once(tmp_path, "exit 3")))
    assert created(cluster) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 16}, r"Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.*gpus"),
        ({"nodes": 2}, r"FailedCreate: Error creating: pods .* exceeded quota.*raise the quota"),
        ({"placement": {"queue": "night"}}, r"queue night has not admitted it: Suspended"),
    ],
)
def test_pods_that_do_not_start_are_explained_in_the_words_of_the_cluster(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    cluster.controllers.pod_quota = 1
    options["placement"] = {**options.get("placement", {}), "start_timeout_s": 1}
    with pytest.raises(LaunchFailed, match=rf"within placement.trainer.start_timeout_s = 1 s: .*{said}"):
        launch_as_job(script(tmp_path, "exec sleep 60", **options))
    await_empty(cluster)


def test_events_that_can_not_be_read_end_no_training_that_waits(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ApiUnreachable("etcd of events is away", 0)

    monkeypatch.setattr(Api, "events", away)
    with pytest.raises(LaunchFailed, match=r"start_timeout_s = 1 s: unknown, etcd of events is away"):
        launch_as_job(script(tmp_path, "true", placement={"queue": "night", "start_timeout_s": 1}))
    await_empty(cluster)


def test_a_missing_image_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.kubelet.missing_images.add("triplane:1")
    with pytest.raises(LaunchFailed, match=r'ImagePullBackOff: Back-off pulling image "triplane:1".*check TRIPLANE_'):
        launch_as_job(script(tmp_path, "true", placement={"start_timeout_s": 1}))


def test_a_missing_config_map_is_named(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "configmap/absent")
    with pytest.raises(LaunchFailed, match=r'CreateContainerConfigError: configmap "absent" not found'):
        launch_as_job(script(tmp_path, "true", placement={"start_timeout_s": 1}))


def test_pods_get_the_variables_of_config_maps_and_secrets(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add("configmaps", {"metadata": {"name": "env"}, "data": {"FROM_MAP": "1"}})
    cluster.add("secrets", {"metadata": {"name": "keys"}, "stringData": {"FROM_SECRET": "2"}})
    monkeypatch.setenv(ENVIRONMENT, "configmap/env, secret/keys")
    launch_as_job(script(tmp_path, "exit $((FROM_MAP + FROM_SECRET - 3))"))


def test_a_training_outlives_an_absence_of_the_api_server(cluster: Cluster, tmp_path: Path) -> None:
    thread = meanwhile(cluster, lambda pod: cluster.down(2))
    launch_as_job(script(tmp_path, "sleep 2"))
    thread.join()
    assert created(cluster) == 1
    cluster.failing = 2
    launch_as_job(script(tmp_path, "sleep 1"))
    assert created(cluster) == 2


def test_a_training_that_takes_too_long_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"took longer than 1 s: raise trainer\.launcher\.timeout_s"):
        launch_as_job(script(tmp_path, "exec sleep 60", timeout_s=1))
    await_empty(cluster)


def test_a_missing_right_is_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.forbidden.add(("create", "jobs"))
    with pytest.raises(LaunchFailed, match=r'cannot create resource "jobs".*grant the verb create on jobs in the'):
        launch_as_job(script(tmp_path, "true"))


def test_what_a_deployment_lacks_is_named(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = script(tmp_path, "true")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(LaunchFailed, match=r"no Kubernetes cluster is configured .*: set KUBECONFIG, or run in a pod"):
        launch_as_job(launch)
    monkeypatch.delenv(IMAGE)
    with pytest.raises(ConfigError, match=f"{IMAGE} is not set"):
        launch_as_job(launch)
    monkeypatch.delenv(PIPES_BUCKET)
    with pytest.raises(LaunchFailed, match=r"needs a bucket that pods can reach: set TRIPLANE_STORE"):
        launch_as_job(launch)


def test_another_training_is_not_adopted(cluster: Cluster, tmp_path: Path) -> None:
    launch = script(tmp_path, "true")
    cluster.add("jobs", {"metadata": {"name": f"train-{launch.key[:20]}"}, "spec": {"suspend": True}, "status": {}})
    with pytest.raises(LaunchFailed, match=r"is not the training .* delete it"):
        launch_as_job(launch)


def await_empty(cluster: Cluster) -> None:
    """Wait until the cluster has no JobSet, Job, pod or Service left."""
    deadline = time.monotonic() + 20
    while any(cluster.objects.all(plural) for plural in ("jobsets", "jobs", "pods", "services")):
        assert time.monotonic() < deadline, "something is left in the cluster"
        time.sleep(0.05)
