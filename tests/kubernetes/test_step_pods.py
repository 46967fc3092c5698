"""Jobs of runs and steps as Kubernetes gets them: placement, labels, no GPU, and no replacement by the Job itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

pytest.importorskip("dagster_k8s")
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import (
    DagsterK8sJobConfig,
    UserDefinedDagsterK8sConfig,
    construct_dagster_k8s_job,
    get_user_defined_k8s_config,
)
from kubernetes.client import ApiClient

from ops.pod_tags import EXPERIMENT_LABEL
from ops.retries import RETRIES
from resources.experiment import Experiment, load_experiment
from triplane_dagster.assembly import definitions_for
from triplane_dagster.executors import step_executor

TINY = Path(__file__).parents[1] / "dagster" / "tiny.yaml"
PLACED = [
    "placement.steps.memory=768Mi",
    "placement.steps.cpu=0.3",
    "placement.steps.node_selector={pool: cpu}",
    "placement.steps.tolerations=[{key: team, value: rl, effect: NoSchedule}]",
    "placement.steps.priority_class=training",
    "trainer.launcher.gpus=8",
]
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "local", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "nobody", "user": {}}],
    "contexts": [{"name": "it", "context": {"cluster": "local", "user": "nobody", "namespace": "rl"}}],
    "current-context": "it",
}


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "k8s")
    return load_experiment(TINY, PLACED)


def jobs_of(experiment: Experiment) -> Iterator[dg.JobDefinition]:
    repository = definitions_for([experiment]).get_repository_def()
    yield from repository.get_all_jobs()


def ops_of(job: dg.JobDefinition) -> list[dg.OpDefinition]:
    return [each for each in job.all_node_defs if isinstance(each, dg.OpDefinition)]


def executor_of(folder: Path, given: dict[str, Any] | None = None) -> Any:
    """The executor of step pods, as Dagster creates it in a run's pod."""
    (folder / "kubeconfig").write_text(json.dumps(KUBECONFIG))
    definition = step_executor()
    config = {
        "load_incluster_config": False,
        "kubeconfig_file": str(folder / "kubeconfig"),
        "retries": {"enabled": {}},
        "per_step_k8s_config": {},
        **(given or {}),
    }
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.InitExecutorContext(
            job=dg.reconstructable(_an_empty_job), executor_def=definition, executor_config=config, instance=instance
        )
        assert definition.executor_creation_fn is not None
        return definition.executor_creation_fn(context)


@dg.job
def _an_empty_job() -> None: ...


def manifest(config: UserDefinedDagsterK8sConfig) -> dict[str, Any]:
    job = construct_dagster_k8s_job(DagsterK8sJobConfig(job_image="triplane:1"), ["x"], "j", config)
    found: dict[str, Any] = ApiClient().sanitize_for_serialization(job)
    return found


def assert_placed(job: dict[str, Any], experiment: Experiment) -> None:
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "300m", "memory": "768Mi"}, "limits": {"memory": "768Mi"}}
    assert pod["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert pod["spec"]["tolerations"] == [{"key": "team", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}]
    assert pod["spec"]["priorityClassName"] == "training"
    for metadata in (pod["metadata"], job["metadata"]):
        assert metadata["labels"][EXPERIMENT_LABEL] == experiment.name


def test_every_step_of_every_job_is_placed_and_retried_by_its_executor(experiment: Experiment, tmp_path: Path) -> None:
    handler = executor_of(tmp_path)._inner._step_handler._inner
    seen = 0
    for job in jobs_of(experiment):
        for op in ops_of(job):
            tagged = K8sContainerContext(run_k8s_config=get_user_defined_k8s_config(op.tags))
            built = manifest(handler._executor_container_context.merge(tagged).run_k8s_config)
            assert_placed(built, experiment)
            assert built["spec"]["backoffLimit"] == 0 and built["spec"]["ttlSecondsAfterFinished"] == 3600, op.name
            assert "podFailurePolicy" not in built["spec"], op.name
            assert op.retry_policy is not None and op.retry_policy.max_retries == RETRIES, op.name
            seen += 1
    assert seen > 25, "plan, shard and merge included"


def test_runs_of_every_job_are_placed_and_not_replaced_by_kubernetes(experiment: Experiment) -> None:
    named = [job for job in jobs_of(experiment) if not job.name.startswith("__")]
    assert len(named) >= 4
    for job in named:
        built = manifest(get_user_defined_k8s_config(job.tags))
        assert_placed(built, experiment)
        assert built["spec"]["backoffLimit"] == 0 and "podFailurePolicy" not in built["spec"]


def test_settings_of_a_run_are_kept_but_never_the_ones_that_let_a_step_hang(
    experiment: Experiment, tmp_path: Path
) -> None:
    asked = {"job_spec_config": {"backoff_limit": 4}, "container_config": {"env": [{"name": "A", "value": "b"}]}}
    executor = executor_of(tmp_path, {"max_concurrent": 7, "step_k8s_config": asked})._inner
    found = executor._step_handler._inner._executor_container_context.run_k8s_config
    assert found.job_spec_config["backoff_limit"] == 0 and found.container_config == asked["container_config"]
    assert executor._max_concurrent == 7 and executor._check_step_health_interval_seconds == 5
    assert not executor.retries.disabled


def test_steps_of_one_process_have_no_policy_so_that_an_interrupt_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPLANE_EXECUTOR", raising=False)
    for job in jobs_of(load_experiment(TINY)):
        assert all(op.retry_policy is None for op in ops_of(job))
