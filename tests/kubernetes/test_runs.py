"""Runs as pods make what runs in one process make; a lost pod of a step or a run costs no work by a person."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

pytest.importorskip("dagster_k8s")

from contracts.store import open_store
from resources.experiment import load_experiment
from tests.kubernetes.objects import Object
from tests.kubernetes.run_world import TINY, RunWorld, run_world
from triplane_dagster.cluster_plan import objects_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def step_of(job: Object) -> str | None:
    """Step that a Job executes; None for a run's."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return next((each["value"] for each in container["env"] if each["name"] == "DAGSTER_RUN_STEP_KEY"), None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunWorld]:
    with run_world(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_a_lost_run_pod_is_relaunched_and_its_steps_end_with_it(world: RunWorld) -> None:
    run_id = world.launch("tiny_base")
    step = world.step_pod("tiny__task_suite")
    world.cluster.kubelet.kill(world.pod_of(f"dagster-run-{run_id}"), reason="OOMKilled")
    world.wait_for(run_id, dg.DagsterRunStatus.FAILURE)
    (event,) = world.events(run_id, dg.DagsterEventType.RUN_FAILURE)
    assert "was killed for memory: its limit is 2Gi: raise placement.steps.memory" in (event.message or "")
    job = step["metadata"]["labels"]["job-name"]
    assert job not in {each["metadata"]["name"] for each in world.cluster.jobs()}
    world.wait_for(world.retry_of(run_id))


def test_an_iteration_of_pods_with_a_killed_and_an_evicted_step_has_the_digests_of_one_process(
    world: RunWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment(TINY)
    world.instance.add_dynamic_partitions("tiny", ["0000"])
    run_id = world.launch("tiny_iteration", "0000")
    world.cluster.kubelet.kill(world.step_pod("tiny__prompts"), reason="OOMKilled")
    evicted = world.step_pod("tiny__rewards")
    world.cluster.kubelet.disrupt(evicted, "EvictionByEvictionAPI", "Eviction API: evicting")
    world.wait_for(run_id)
    retried = {event.step_key: event for event in world.events(run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY)}
    assert set(retried) == {"tiny__prompts", "tiny__rewards"}
    error = retried["tiny__prompts"].step_retry_data.error
    assert error and "was killed for memory: its limit is 2Gi: raise placement.steps.memory" in error.message
    made = {step_of(job) for job in world.cluster.jobs() if job["metadata"]["labels"]["dagster/run-id"] == run_id}
    monkeypatch.setenv("TRIPLANE_KUBERNETES_IMAGE", "triplane:1")
    planned = [each.purpose for each in objects_of(experiment, open_store(str(tmp_path / "fresh")), world.instance)]
    promised = planned[planned.index("run of tiny_iteration") + 1 :]
    assert made - {None} == {each.removeprefix("step ") for each in promised if each.startswith("step ")}
    for job in world.cluster.jobs():
        assert job["spec"]["backoffLimit"] == 0 and "podFailurePolicy" not in job["spec"]
    world.check_against_one_process(tmp_path / "alone")
