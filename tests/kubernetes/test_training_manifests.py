"""Where a training runs: chosen by the deployment, the same keys everywhere, and the objects that are created."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubernetes import client

from contracts.digests import digest_of
from contracts.errors import ConfigError
from contracts.store import open_store
from ops.base_graph import BASE_POLICY
from resources.errors import LaunchFailed
from resources.experiment import Experiment, parse_experiment
from resources.kubernetes.manifests import Attempt, job_name, service_manifest, training_manifest
from resources.kubernetes.settings import ACCOUNT, ENVIRONMENT, IMAGE, RELEASE, read_settings
from resources.launch import Launch
from resources.placement import Toleration, TrainerPlacement
from resources.training_launcher import LAUNCHER, chosen_kind, launch_refusal, require_launchable
from triplane_dagster.dry_run import plan_of

KEY = digest_of(["manifest"])
SETTINGS = {IMAGE: "registry/triplane:1", ACCOUNT: "trainer", ENVIRONMENT: "configmap/env,secret/s3", RELEASE: "night"}


def with_launcher(**values: object) -> Experiment:
    return parse_experiment({"name": "one", "trainer": {"launcher": values}})


def launch_of(**options: object) -> Launch:
    return Launch(["python", "-m", "trainer"], key=KEY, experiment="one_", **options)  # type: ignore[arg-type]


def manifest_of(launch: Launch) -> dict[str, object]:
    attempt = Attempt(2, "triplane-pipes/one", "run", {"DAGSTER_PIPES_CONTEXT": "x"}, 29400)
    return training_manifest(launch, read_settings(SETTINGS), "triplane", attempt)


def test_processes_on_several_nodes_have_the_keys_of_processes_on_one() -> None:
    one, two = with_launcher(ranks=2), with_launcher(nodes=2, ranks=1)
    kubernetes = with_launcher(nodes=2, ranks=1, kind="kubernetes")
    digests = {BASE_POLICY.settings_digest(each) for each in (one, two, kubernetes)}
    assert len(digests) == 1
    assert BASE_POLICY.settings_digest(with_launcher(ranks=1)) not in digests
    assert one.trainer.launcher.job_fields == kubernetes.trainer.launcher.job_fields


def test_deployment_chooses_the_launcher_unless_the_experiment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    assert (chosen_kind("auto"), chosen_kind("kubernetes")) == ("local", "kubernetes")
    monkeypatch.setenv(LAUNCHER, "kubernetes")
    assert (chosen_kind("auto"), chosen_kind("local")) == ("kubernetes", "local")
    monkeypatch.setenv(LAUNCHER, "slurm")
    with pytest.raises(ConfigError, match="TRIPLANE_LAUNCHER=slurm: no such launcher; use local or kubernetes"):
        chosen_kind("auto")


def test_kubernetes_takes_nodes_and_gpus_that_this_machine_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = with_launcher(nodes=2, gpus=8)
    with pytest.raises(LaunchFailed, match=r"nodes=2: .* set it to 1, or trainer\.launcher\.kind to kubernetes"):
        require_launchable(large)
    monkeypatch.setenv(LAUNCHER, "kubernetes")
    require_launchable(large)
    (row,) = (row for row in plan_of(large, open_store(str(tmp_path))) if row.step == "checkpoint")
    assert row.where == "kubernetes launcher, 2 node(s), 8 GPU(s)"
    refusal = launch_refusal(with_launcher(nodes=2, ranks=1, starter="torchrun"))
    assert refusal is not None and "starter=torchrun: starts the processes of one machine only" in refusal


def test_job_is_created_once_and_never_retried_by_kubernetes() -> None:
    job = manifest_of(launch_of(nodes=4, timeout_s=100.0))
    meta, spec = job["metadata"], job["spec"]
    assert isinstance(meta, dict) and isinstance(spec, dict)
    assert meta["name"] == job_name(KEY) == f"train-{KEY[:20]}"
    assert meta["annotations"] == {
        "triplane/job-key": KEY,
        "triplane/restarts": "2",
        "triplane/messages": "triplane-pipes/one",
        "triplane/run": "run",
    }
    assert all(len(value) <= 63 for value in meta["labels"].values()) and meta["labels"]["triplane/experiment"] == "one"
    assert meta["labels"]["app.kubernetes.io/instance"] == "night"
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (0, 3600, 701)
    assert "suspend" not in spec


def test_pod_runs_without_rights_and_gets_its_place() -> None:
    placement = TrainerPlacement(
        cpu=8, memory="64Gi", gpu_resource="nvidia.com/mig-3g.40gb", node_selector={"pool": "gpu"},
        tolerations=(Toleration(key="gpu"),), priority_class="training", queue="night",
    )  # fmt: skip
    job = manifest_of(launch_of(nodes=2, gpus=4, placement=placement))
    spec = job["spec"]
    assert isinstance(spec, dict) and spec["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "night"  # type: ignore[index]
    pod = spec["template"]["spec"]
    assert (pod["nodeSelector"], pod["priorityClassName"]) == ({"pool": "gpu"}, "training")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", False)
    assert {"key": "gpu", "operator": "Exists"} in pod["tolerations"]
    (container,) = pod["containers"]
    limits = {"memory": "64Gi", "nvidia.com/mig-3g.40gb": "4"}
    assert container["resources"] == {"requests": {"cpu": "8000m", **limits}, "limits": limits}
    assert container["envFrom"] == [{"configMapRef": {"name": "env"}}, {"secretRef": {"name": "s3"}}]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["MASTER_ADDR"] == f"{job_name(KEY)}-0.{pod['subdomain']}" and values["TRIPLANE_NODES"] == "2"
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/tmp", "/dev/shm"}


def test_manifests_have_only_fields_of_the_api() -> None:
    job = manifest_of(launch_of(nodes=2, gpus=1, placement=TrainerPlacement(tolerations=(Toleration(key="gpu"),))))
    job["metadata"]["uid"] = "1"  # type: ignore[index]
    api = client.ApiClient()
    for kind, made in ((client.V1Job, job), (client.V1Service, service_manifest(job))):
        read = api._ApiClient__deserialize(made, kind)
        assert api.sanitize_for_serialization(read) == made


def as_jobset(**options: object) -> dict[str, object]:
    return manifest_of(launch_of(nodes=2, gpus=1, placement=TrainerPlacement(workload="jobset", **options)))  # type: ignore[arg-type]


def test_jobset_is_the_job_with_one_name_and_a_queue_of_its_own() -> None:
    job = manifest_of(launch_of(nodes=2, gpus=1, placement=TrainerPlacement(queue="night")))
    whole = as_jobset(queue="night")
    assert whole["metadata"] == job["metadata"]
    spec = whole["spec"]
    assert isinstance(spec, dict) and spec["suspend"] is True and spec["ttlSecondsAfterFinished"] == 3600
    assert "failurePolicy" not in spec, "the launcher decides about restarts"
    (replicated,) = spec["replicatedJobs"]
    assert replicated["replicas"] == 1
    own, alone = replicated["template"]["spec"], job["spec"]
    assert isinstance(alone, dict)
    assert {**own, "suspend": True, "ttlSecondsAfterFinished": 3600, "template": 0} == {**alone, "template": 0}
    pods, of_job = ({each["name"]: each for each in template["template"]["spec"]["containers"][0]["env"]}
                    for template in (own, alone))  # fmt: skip
    name = job_name(KEY)
    assert pods.pop("MASTER_ADDR")["value"] == f"{name}-trainer-0-0.{name}"
    del of_job["MASTER_ADDR"]
    assert pods == of_job and own["template"]["metadata"] == alone["template"]["metadata"]


def test_jobset_has_only_fields_of_the_published_api() -> None:
    tolerations = (Toleration(key="gpu"),)
    for made in (as_jobset(tolerations=tolerations), as_jobset(queue="night", priority_class="training")):
        read = JobsetV1alpha2JobSet.from_dict(made)
        assert read is not None and read.to_dict() == made
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["misspelled"] = True  # type: ignore[index]
    read = JobsetV1alpha2JobSet.from_dict(made)
    assert read is not None and read.to_dict() != made


def test_malformed_settings_name_the_variable() -> None:
    with pytest.raises(ConfigError, match=f"{ENVIRONMENT}: 'env' is neither configmap/NAME nor secret/NAME"):
        read_settings({IMAGE: "a", ENVIRONMENT: "env"})
