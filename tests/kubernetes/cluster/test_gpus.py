"""Trainers get the GPUs that they ask for, wait for them with a reason, and share them by priority. The node's GPUs are
numbers that it advertises: nothing computes on them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.store import open_store
from resources.errors import LaunchFailed
from resources.kubernetes.launcher import KubernetesLauncher
from resources.placement import TrainerPlacement
from tests.dagster.launching import launch_in_an_op
from tests.kubernetes.cluster.world import World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
GPUS = 8


@pytest.fixture
def gpus(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a node that advertises GPUs."""
    for name, value in {**world.store, **world.launching}.items():
        monkeypatch.setenv(name, value)
    node = json.loads(world.kubectl("get", "nodes", "--output", "json"))["items"][0]["metadata"]["name"]
    path = "/status/capacity/nvidia.com~1gpu"
    patch = [{"op": "add", "path": path, "value": str(GPUS)}]
    world.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(patch))
    allocatable = ("get", "node", node, "--output", "jsonpath={.status.allocatable.nvidia\\.com/gpu}")
    world.wait("allocatable GPUs", lambda: world.kubectl(*allocatable) == str(GPUS), 60)
    yield node
    for section in ("capacity", "allocatable"):
        remove = [{"op": "remove", "path": f"/status/{section}/nvidia.com~1gpu"}]
        world.kubectl(
            "patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(remove), check=False
        )


def launch(name: str, command: str, gpus: int, wait_s: float = 120, priority: str | None = None) -> None:
    """Run a shell command as a training with GPUs. Raises LaunchFailed."""
    placement = TrainerPlacement(cpu=0.05, memory="64Mi", start_timeout_s=wait_s, priority_class=priority)
    launch_in_an_op(
        KubernetesLauncher(),
        ["sh", "-c", command],
        [],
        gpus=gpus,
        key=key_of(name),
        experiment=name,
        store=open_store(),
        placement=placement,
    )


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def test_training_of_two_gpus_gets_two_on_the_node_that_has_them(world: World, gpus: str) -> None:
    trained = threading.Thread(target=launch, args=("two", "sleep 8", 2))
    trained.start()
    (pod,) = world.wait("its pod", lambda: world.get("pods", "triplane/experiment=two"), 60)
    world.wait("it is placed", lambda: world.get("pods", "triplane/experiment=two")[0]["spec"].get("nodeName"), 60)
    (pod,) = world.get("pods", "triplane/experiment=two")
    assert pod["spec"]["nodeName"] == gpus
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    trained.join()
    assert not world.get("jobs", "triplane/experiment=two")


def test_training_of_more_gpus_than_there_are_says_so_after_its_bound(world: World, gpus: str) -> None:
    with pytest.raises(LaunchFailed, match=r"start_timeout_s = 10 s: .*Insufficient nvidia\.com/gpu"):
        launch("sixteen", "true", 2 * GPUS, wait_s=10)
    assert not world.get("jobs", "triplane/experiment=sixteen"), "nothing waits for GPUs any more"


def test_training_that_needs_more_memory_than_its_limit_names_the_limit(world: World, gpus: str) -> None:
    with pytest.raises(LaunchFailed, match=r"64Mi.*placement\.trainer\.memory"):
        launch("hungry", "exec python -c 'bytearray(10**9)'", 0)


def test_training_of_a_higher_priority_takes_gpus_and_the_other_one_continues(
    world: World, gpus: str, tmp_path: Path
) -> None:
    for name, value in (("triplane-test-low", 100), ("triplane-test-high", 1000)):
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        world.apply([{**kind, "value": value}])
    ended: list[str] = []

    def run(name: str, seconds: int, priority: str) -> None:
        launch(name, f"sleep {seconds}", GPUS, priority=priority)
        ended.append(name)

    low = threading.Thread(target=run, args=("low", 25, "triplane-test-low"))
    low.start()
    world.wait("low runs", lambda: _phase(world, "low") == "Running", 60)
    high = threading.Thread(target=run, args=("high", 3, "triplane-test-high"))
    high.start()
    high.join()
    low.join()
    assert ended == ["high", "low"]


def _phase(world: World, name: str) -> str | None:
    return next((pod["status"]["phase"] for pod in world.get("pods", f"triplane/experiment={name}")), None)
