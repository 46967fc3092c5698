"""Placement of pods: no action key depends on it, and what Kubernetes would refuse is refused when a file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.store import open_store
from ops.graph import graph_of
from ops.state import IterationState
from resources.errors import ExperimentError
from resources.experiment import load_experiment
from resources.placement import PodPlacement, Toleration, TrainerPlacement

TINY = Path(__file__).with_name("tiny.yaml")


def test_placement_changes_no_slice_of_any_step(tmp_path: Path) -> None:
    plain, store = load_experiment(TINY), open_store(str(tmp_path))
    moved = load_experiment(TINY, ["placement.trainer.memory=64Gi", "placement.steps.priority_class=low"])
    assert plain.placement != moved.placement
    for spec in graph_of(plain):
        if spec.once:
            assert spec.slice(IterationState(plain, store)) == spec.slice(IterationState(moved, store)), spec.name


def test_placement_has_the_form_of_a_pod() -> None:
    pods = PodPlacement(
        cpu=0.25,
        memory="512Mi",
        node_selector={"pool": "cpu"},
        tolerations=(Toleration(key="spot"), Toleration(key="team", value="rl", effect="NoSchedule")),
        priority_class="training",
    )
    assert pods.resources() == {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}}
    assert pods.pod_fields() == {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [
            {"key": "spot", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "rl", "effect": "NoSchedule"},
        ],
        "priorityClassName": "training",
    }
    assert PodPlacement().pod_fields() == {}


def test_gpus_are_requested_by_the_name_of_their_resource() -> None:
    slices = TrainerPlacement(gpu_resource="nvidia.com/mig-3g.40gb")
    assert slices.resources_with(2)["limits"]["nvidia.com/mig-3g.40gb"] == "2"
    assert slices.resources_with(0) == slices.resources()


@pytest.mark.parametrize(
    "override",
    [
        "placement.trainer.memory=64GB",
        "placement.trainer.memory=64",
        "placement.steps.cpu=0",
        "placement.trainer.gpu_resource=two gpus",
        "placement.trainer.gpu_resource=gpu",  # Kubernetes refuses a name without a domain, after the rollouts
        "placement.steps.node_selector={pool: 'a b'}",
        "placement.steps.tolerations=[{key: spot, effect: Sometimes}]",
        "placement.trainer.gpus=8",
    ],
)
def test_what_kubernetes_would_refuse_is_named_with_its_field(override: str) -> None:
    with pytest.raises(ExperimentError, match=override.split("=")[0].rpartition(".")[2].replace(".", r"\.")):
        load_experiment(TINY, [override])


def test_a_part_of_a_section_keeps_the_other_defaults() -> None:
    steps = load_experiment(TINY, ["placement.steps.memory=1Gi"]).placement.steps
    assert steps.resources()["requests"] == {"cpu": "250m", "memory": "1Gi"}
