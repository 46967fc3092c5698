"""Objects that an iteration creates on Kubernetes, without creating any: Jobs of runs and steps, and of the trainer.

They are built by what builds the real ones: dagster-k8s with the deployment's run launcher, and the trainer's launcher.
Ids that exist only later (of runs, of the Job) are zeros and a number; a key that depends on what is still to be made
is some digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import dagster as dg

from contracts.digests import digest_of
from contracts.errors import ConfigError
from contracts.kubernetes_client import NAMESPACE_VARIABLE
from contracts.store import Store
from ops.base_graph import BASE_POLICY
from ops.graph import CHECKPOINT, ROLLOUTS
from ops.retries import steps_in_one_process
from resources.experiment import Experiment
from resources.kubernetes.manifests import Attempt, is_set, job_name, service_manifest, training_manifest
from resources.kubernetes.settings import ENVIRONMENT, IMAGE, read_settings
from resources.launch import Launch
from triplane_dagster.assembly import definitions_for
from triplane_dagster.dry_run import PlannedStep, plan_of
from triplane_dagster.jobs import base_job_name, half_job_name, iteration_job_name

if TYPE_CHECKING:
    from dagster_k8s import K8sRunLauncher
    from dagster_k8s.container_context import K8sContainerContext

Object = dict[str, Any]
_ID = "00000000-0000-0000-0000-00000000000"


@dataclass(frozen=True)
class PlannedObject:
    """An object that would be created, and for what."""

    purpose: str
    manifest: Object


def objects_of(experiment: Experiment, store: Store, instance: dg.DagsterInstance) -> list[PlannedObject]:
    """Objects of the next iteration, in order of their creation. Raises ConfigError."""
    try:
        from dagster_k8s import K8sRunLauncher
    except ImportError:
        raise ConfigError("--on kubernetes needs dagster-k8s: run pip install 'triplane[k8s]'") from None
    steps = {step.step: step for step in plan_of(experiment, store)}
    launcher = _launcher(instance)
    assert launcher is None or isinstance(launcher, K8sRunLauncher)
    with steps_in_one_process():  # the objects are the same, and nothing of a cluster is needed
        definitions = definitions_for([experiment])
    planned: list[PlannedObject] = []
    for number, name in enumerate(_job_names(experiment, steps), start=1):
        planned += _run_objects(definitions.resolve_job_def(name), f"{_ID}{number}", experiment, launcher)
    for spec in (BASE_POLICY, CHECKPOINT):
        if steps[spec.name].state != "found" and _is_trained(experiment, spec.name):
            planned += _trainer_objects(experiment, steps[spec.name], launcher)
    return planned


def _launcher(instance: dg.DagsterInstance) -> K8sRunLauncher | None:
    """The instance's run launcher if it launches pods; None on a laptop, whose instance has another one."""
    from dagster_k8s import K8sRunLauncher
    from kubernetes.config import ConfigException

    try:
        found = instance.run_launcher
    except ConfigException as error:
        raise ConfigError(f"the run launcher of $DAGSTER_HOME finds no cluster ({error}): set KUBECONFIG") from None
    return found if isinstance(found, K8sRunLauncher) else None


def _job_names(experiment: Experiment, steps: Mapping[str, PlannedStep]) -> Iterator[str]:
    if any(step.partition is None and step.state != "found" for step in steps.values()):
        yield base_job_name(experiment)
    if experiment.off_policy.overlap:
        yield from (half_job_name(experiment, half) for half in ("sample", "learn"))
    else:
        yield iteration_job_name(experiment)


def _run_objects(
    job: dg.JobDefinition, run_id: str, experiment: Experiment, launcher: K8sRunLauncher | None
) -> Iterator[PlannedObject]:
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import UserDefinedDagsterK8sConfig, get_k8s_job_name, get_user_defined_k8s_config

    from triplane_dagster.step_pods import configured

    base = _pods_of(launcher)
    tagged = base.merge(K8sContainerContext(run_k8s_config=get_user_defined_k8s_config(job.tags)))
    yield _planned(f"run of {job.name}", f"dagster-run-{run_id}", "execute_run", tagged, launcher)
    ours = UserDefinedDagsterK8sConfig(**configured({})["step_k8s_config"])
    for key, op in _steps(job.graph, experiment):
        own = get_user_defined_k8s_config(op.tags)
        pods = base.merge(K8sContainerContext(run_k8s_config=ours)).merge(K8sContainerContext(run_k8s_config=own))
        name = f"dagster-step-{get_k8s_job_name(run_id, key)}"  # type: ignore[no-untyped-call]
        yield _planned(f"step {key}", name, "execute_step", pods, launcher)


def _steps(graph: dg.GraphDefinition, experiment: Experiment, above: str = "") -> Iterator[tuple[str, dg.OpDefinition]]:
    """Steps and their ops; the mapped op of rollouts once for each shard."""
    for node in graph.nodes_in_topological_order:
        key = f"{above}{node.name}"
        if isinstance(node.definition, dg.GraphDefinition):
            yield from _steps(node.definition, experiment, f"{key}.")
        elif isinstance(node.definition, dg.OpDefinition):
            shards = experiment.prompts.workers if node.name.endswith(f"_{ROLLOUTS.name}_shard") else 0
            keys = [f"{key}[shard{number:04d}]" for number in range(shards)] or [key]
            yield from ((each, node.definition) for each in keys)


def _pods_of(launcher: K8sRunLauncher | None) -> K8sContainerContext:
    """What all pods of runs and steps have: the run launcher's settings, else those of trainers."""
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import UserDefinedDagsterK8sConfig

    if launcher is None:
        sources = [part.strip().partition("/") for part in os.environ.get(ENVIRONMENT, "").split(",")]
        return K8sContainerContext(
            namespace=os.environ.get(NAMESPACE_VARIABLE) or "default",
            env_config_maps=[name for kind, _, name in sources if kind == "configmap"],
            env_secrets=[name for kind, _, name in sources if kind == "secret"],
        )
    return K8sContainerContext(
        namespace=launcher.job_namespace,
        image_pull_policy=launcher.image_pull_policy,
        image_pull_secrets=launcher.image_pull_secrets,
        service_account_name=launcher.service_account_name,
        env_config_maps=launcher.env_config_maps,
        env_secrets=launcher.env_secrets,
        env_vars=launcher.env_vars,
        volume_mounts=launcher.volume_mounts,
        volumes=launcher.volumes,
        labels=launcher.labels,
        resources=launcher.resources,
        run_k8s_config=UserDefinedDagsterK8sConfig.from_dict(  # type: ignore[no-untyped-call]
            launcher.run_k8s_config or {}
        ),
    )


def _planned(
    purpose: str, name: str, command: str, pods: K8sContainerContext, launcher: K8sRunLauncher | None
) -> PlannedObject:
    from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job
    from kubernetes.client import ApiClient

    image = os.environ.get("DAGSTER_CURRENT_IMAGE") or os.environ.get(IMAGE)
    config = (
        pods.get_k8s_job_config(image, launcher)
        if launcher
        else DagsterK8sJobConfig(job_image=image, dagster_home=None)
    )
    if not config.job_image:
        raise ConfigError(f"{IMAGE} is not set: set it to the image of pods, such as registry/triplane:1")
    args = ["dagster", "api", command, "..."]
    job = construct_dagster_k8s_job(config, args, name, pods.run_k8s_config, name, f"{command.split('_')[1]}_worker")
    manifest: Object = ApiClient().sanitize_for_serialization(job)
    manifest["metadata"]["namespace"] = pods.namespace
    return PlannedObject(purpose, manifest)


def _is_trained(experiment: Experiment, step: str) -> bool:
    """Whether a trainer's Job makes the checkpoint of this step."""
    launched = experiment.trainer.launcher.kind != "local"
    return launched and (step == CHECKPOINT.name or (experiment.base.kind == "sft" and experiment.fork is None))


def _trainer_objects(
    experiment: Experiment, step: PlannedStep, launcher: K8sRunLauncher | None
) -> Iterator[PlannedObject]:
    where, key = experiment.trainer.launcher, step.key or digest_of([experiment.name, step.step])
    launch = Launch(
        ["python", "-m", "trainer", "--job", "..."],
        nodes=where.nodes,
        gpus=where.gpus,
        timeout_s=where.timeout_s,
        key=key,
        experiment=experiment.name,
        placement=experiment.placement.trainer,
    )
    namespace = launcher.job_namespace if launcher else os.environ.get(NAMESPACE_VARIABLE) or "default"
    attempt = Attempt(0, f"pipes/{key}/...", f"{_ID}0", {}, 29400)
    job = training_manifest(launch, read_settings(), namespace, attempt)
    later = "" if step.key else ", whose key is known once its inputs are made"
    yield PlannedObject(f"trainer of {step.step}{later}", job)
    if is_set(job):
        return  # its controller makes the Service
    service = service_manifest({**job, "metadata": {**job["metadata"], "uid": f"{_ID}0"}})
    yield PlannedObject(f"names of the pods of {job_name(key)}", service)
