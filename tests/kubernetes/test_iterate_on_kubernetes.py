"""`triplane iterate --on kubernetes` prints the objects of an iteration, or asks the deployment for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from kubernetes import client, config
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

pytest.importorskip("dagster_k8s")

from contracts.errors import ConfigError
from contracts.store import open_store
from resources.errors import TargetRefused
from resources.experiment import load_experiment
from tests.kubernetes.api_server import NAMESPACE, Cluster, serving
from triplane_dagster.cli.app import app
from triplane_dagster.cli.on_kubernetes import ask
from triplane_dagster.targets import unfinished_target

TINY = Path(__file__).parents[1] / "dagster" / "tiny.yaml"
OVERRIDES = ("placement.steps.memory=700Mi", "trainer.launcher.nodes=2", "trainer.launcher.gpus=8")


@pytest.fixture(autouse=True)
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    for name, value in {
        "DAGSTER_HOME": str(tmp_path),
        "TRIPLANE_STORE": str(tmp_path / "store"),
        "TRIPLANE_KUBERNETES_IMAGE": "registry/triplane:1",
        "TRIPLANE_KUBERNETES_NAMESPACE": NAMESPACE,
        "TRIPLANE_KUBERNETES_ENV": "configmap/t-env,secret/t-s3",
    }.items():
        monkeypatch.setenv(name, value)


def dry_run(*options: str) -> Any:
    sets = [part for each in OVERRIDES for part in ("--set", each)]
    done = CliRunner().invoke(app, ["iterate", "-e", str(TINY), "--on", "kubernetes", "--dry-run", *sets, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_object_is_printed_as_yaml_that_a_cluster_takes(tmp_path: Path) -> None:
    objects = list(yaml.safe_load_all(dry_run()))
    assert [each["kind"] for each in objects].count("Service") == 2, "of base policy and checkpoint"
    assert len({each["metadata"]["name"] for each in objects if each["kind"] == "Job"}) == len(objects) - 2
    with serving(Cluster(tmp_path / "cluster")) as cluster:
        config.load_kube_config(str(cluster.folder / "kubeconfig.json"))
        for each in objects:
            each.setdefault("spec", {}).update({"suspend": True} if each["kind"] == "Job" else {})
            if each["kind"] == "Job":
                client.BatchV1Api().create_namespaced_job(NAMESPACE, each)
            else:
                client.CoreV1Api().create_namespaced_service(NAMESPACE, each)
        assert len(cluster.jobs()) == len(objects) - 2
    assert not (tmp_path / "store" / "artifacts").exists()


def test_steps_hold_no_gpu_and_trainers_do() -> None:
    for each in json.loads(dry_run("--json")):
        if each["manifest"]["kind"] != "Job":
            continue
        spec = each["manifest"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert container["image"] == "registry/triplane:1"
        assert {"configMapRef": {"name": "t-env"}} in container["envFrom"]
        assert spec["backoffLimit"] == 0 and "podFailurePolicy" not in spec
        if each["purpose"].startswith("trainer"):
            assert spec["completions"] == 2 and container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        else:
            assert container["resources"]["limits"] == {"memory": "700Mi"}


def test_a_trainer_of_an_experiment_with_jobsets_is_one() -> None:
    planned = json.loads(dry_run("--json", "--set", "placement.trainer.workload=jobset"))
    trainers = [each["manifest"] for each in planned if each["purpose"].startswith("trainer")]
    assert len(trainers) == 2 and {each["kind"] for each in trainers} == {"JobSet"}
    assert "Service" not in {each["manifest"]["kind"] for each in planned}, "the JobSet controller makes it"


def test_without_an_image_one_line_says_which_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPLANE_KUBERNETES_IMAGE")
    done = CliRunner().invoke(app, ["iterate", "-e", str(TINY), "--on", "kubernetes", "--dry-run"])
    assert done.exit_code == 1 and done.stderr.startswith("error: TRIPLANE_KUBERNETES_IMAGE is not set: set it to")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store on S3."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="asked")
    monkeypatch.setenv("TRIPLANE_STORE", "s3://asked/store")
    yield
    server.stop()


def test_a_deployment_is_asked_through_the_store(shared: None, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = load_experiment(TINY)
    ask(experiment, 3, None, as_json=False)
    assert "asked for iterations 0000 to 0002 of tiny" in capsys.readouterr().out
    target = unfinished_target(open_store(), experiment)
    assert target is not None and target.by == "dagster" and target.count == 3
    with pytest.raises(TargetRefused, match="are under way"):
        ask(experiment, 1, None, as_json=False)


def test_what_a_deployment_can_not_see_is_refused(
    shared: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    experiment = load_experiment(TINY)
    with pytest.raises(ConfigError, match="takes no --set"):
        ask(experiment, 1, ["seed=4"], as_json=False)
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    with pytest.raises(ConfigError, match="is on this machine: set TRIPLANE_STORE"):
        ask(experiment, 1, None, as_json=False)
