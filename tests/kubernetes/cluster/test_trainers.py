"""Trainings over two nodes: the checkpoints of two local processes, also after a pod was killed."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from contracts.artifacts import ArtifactRef, list_artifacts
from contracts.store import open_store
from tests.acceptance.laboratory import Laboratory
from tests.kubernetes.cluster.conftest import EXPERIMENTS
from tests.kubernetes.cluster.world import World
from trainer.config import SNAPSHOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(3600)]
BACKENDS = ("fsdp2", "deepspeed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_nodes_train_what_two_local_processes_train(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    nodes: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            for pod in world.get("pods", "app.kubernetes.io/component=trainer", f"triplane/experiment={backend}"):
                nodes.add(pod["spec"].get("nodeName", ""))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        world.iterate(backend, 1)
    finally:
        over.set()
        watcher.join()
    assert len(nodes - {""}) == 2, f"the pods ran on {nodes}"
    _require_equal(world, tmp_path, monkeypatch, backend)


def test_training_whose_pods_are_killed_continues_from_its_snapshot(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in world.store.items():
        monkeypatch.setenv(variable, value)
    store = open_store(world.store["TRIPLANE_STORE"])
    seen: set[ArtifactRef] = set()
    victims: list[str] = []

    def trained_further() -> bool:
        return bool({each.ref for each in list_artifacts(store, SNAPSHOT)} - seen)

    def running(index: int) -> str | None:
        labels = ("triplane/experiment=killed", f"batch.kubernetes.io/job-completion-index={index}")
        pods = [pod for pod in world.get("pods", *labels) if pod["status"]["phase"] == "Running"]
        return next((pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in victims), None)

    world.train("killed", 1)
    for index in (1, 0):
        world.wait("another snapshot", trained_further)
        victims.append(world.wait(f"pod {index}", partial(running, index)))
        seen |= {each.ref for each in list_artifacts(store, SNAPSHOT)}
        world.kubectl("delete", "pod", victims[-1], "--grace-period=0", "--force")
    world.finish("killed", 1)
    _require_equal(world, tmp_path, monkeypatch, "killed")


def _require_equal(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Compare with a run of this machine whose two ranks are processes of one machine."""
    local = Laboratory(
        tmp_path / "local",
        EXPERIMENTS / f"{name}.yaml",
        ("trainer.launcher.nodes=1", "trainer.launcher.ranks=2"),
    )
    local.iterate(1)
    for variable, value in world.store.items():
        monkeypatch.setenv(variable, value)
    remote = Laboratory(tmp_path / "remote", EXPERIMENTS / f"{name}.yaml", environment=world.store)
    for kind, iteration in (("base_policy", None), ("checkpoint", "0000")):
        assert remote.artifact(kind, iteration).ref.digest == local.artifact(kind, iteration).ref.digest, kind
