"""The pods backend against a stand-in for a cluster that runs the real agent (kubernetes_server.py)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.backends.base import IsolationLevel
from envd.backends.pods import api
from envd.backends.pods import backend as pods
from envd.backends.pods import manifest as pods_manifest
from envd.errors import BackendUnavailable, SandboxGone, SandboxStartError

pytest.register_assert_rewrite("tests.envd.backend_contract")

from tests.envd.backend_contract import Machines, says  # noqa: E402
from tests.envd.kubernetes_server import TOKEN, Cluster  # noqa: E402
from tests.envd.stand_ins import pods_cluster  # noqa: E402
from tests.envd.test_services_tls import certificate  # noqa: E402

DEAD = "000000.1.1.dead"


@pytest.fixture(scope="module", params=["v5.channel.k8s.io", "v4.channel.k8s.io"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pods_cluster(tmp_path_factory.mktemp("containers"), request.param) as made:
        yield made


@pytest.fixture(scope="module")
def machines(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with asyncio.Runner() as runner:
        backend = runner.run(pods.start(tmp_path_factory.mktemp("run")))
        yield Machines(runner, backend, tmp_path_factory.mktemp("here"))
        runner.run(backend.stop())
    assert cluster.pods == {}


def test_a_pod_has_no_rights_no_network_and_an_end(machines: Machines, cluster: Cluster) -> None:
    async def job(here: Machines) -> None:
        await here.create()
        (pod,) = cluster.pods.values()
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert spec["runtimeClassName"] == "sandboxed" and spec["automountServiceAccountToken"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"] == {"memory": "416Mi", "cpu": "1000m"}
        assert spec["activeDeadlineSeconds"] == 120 + 600 + 60, "a slow start takes none of its lifetime"
        policy = cluster.policies[pods_manifest.POLICY]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy
        assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()

    machines.run(job)
    assert machines.backend.features.isolation == IsolationLevel.KERNEL
    assert cluster.pods == {}


def test_a_runtime_is_mounted_where_the_images_packages_are(
    machines: Machines, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "runtime" not in machines.backend.features.can
    monkeypatch.setattr(machines.backend, "_packages", str(tmp_path))

    async def job(here: Machines) -> None:
        assert "runtime" in here.backend.features.can
        await here.create(runtime=here.runtime("1"))
        (pod,) = cluster.pods.values()
        (container,) = pod["spec"]["containers"]
        assert {"name": "packages", "mountPath": str(tmp_path)} in container["volumeMounts"]
        assert container["resources"]["limits"]["memory"] == "432Mi"
        assert [each["emptyDir"]["sizeLimit"] for each in pod["spec"]["volumes"]][2:] == ["16Mi"]

    machines.run(job)
    assert (tmp_path / "more.py").read_text() == "name = '1'\n"


def test_packages_need_an_absolute_directory(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_ENVD_PODS_PACKAGES", "site-packages")
    with pytest.raises(BackendUnavailable, match="such as /usr/local/lib"):
        asyncio.run(pods.start(tmp_path))


def test_template_files_keep_their_times(machines: Machines) -> None:
    """A diff compares them."""

    async def job(here: Machines) -> None:
        box = await here.create()
        entry, _ = await box.guest.read("calc.py")
        assert entry.mtime_ns // 10**9 == (here.directory / "templates/shared/calc.py").stat().st_mtime_ns // 10**9

    machines.run(job)


def test_large_files_pass_the_stream_whole(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        content = bytes(range(256)) * 12_000
        await box.guest.write("large", content)
        _, found = await box.guest.read_all("large", 1 << 24)
        assert found == content

    machines.run(job)


def test_an_agent_that_dies_is_told_and_its_pod_deleted(machines: Machines, cluster: Cluster) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        (process,) = cluster.processes.values()
        process.kill()
        with pytest.raises(SandboxGone):
            await says(box, "sleep 5")
        await box.destroy()
        await box.destroy()

    machines.run(job)
    assert cluster.pods == {}


def test_an_image_that_can_not_be_had_is_told_in_the_clusters_words(
    machines: Machines, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines.backend, "_image", cluster.broken_image)
    with pytest.raises(SandboxStartError, match="ErrImagePull: failed to pull"):
        machines.run(lambda here: here.create())
    assert cluster.pods == {}


def test_a_pod_without_a_node_is_told_in_the_clusters_words(
    machines: Machines, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "START_S", 0.1)
    monkeypatch.setattr(cluster, "has_nodes", False)
    with pytest.raises(SandboxStartError, match="Unschedulable: 0/1 nodes fit"):
        machines.run(lambda here: here.create())
    assert cluster.pods == {}


def test_an_api_server_that_is_busy_for_a_moment_loses_no_sandbox(
    machines: Machines, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_FIRST_PAUSE_S", 0.01)

    async def job(here: Machines) -> None:
        cluster.busy[:] = [500, 429, 503]  # the first reply to the creation is lost
        box = await here.create()
        assert await says(box, "echo well") == "well" and len(cluster.pods) == 1
        cluster.busy[:] = [429, 504]
        await box.destroy()
        assert cluster.pods == {} and not cluster.busy

    machines.run(job)
    cluster.busy[:] = [403, *[500] * 5]
    with pytest.raises(SandboxStartError, match=r"refused create_namespaced_pod: busy .*its deadline ends it"):
        machines.run(lambda here: here.create())
    cluster.pods.clear()


def test_pods_of_a_server_that_was_killed_are_removed(
    machines: Machines, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "is_abandoned", lambda label: label == DEAD)
    for name, owner in (("left", DEAD), ("others", "other.1.1.live")):
        cluster.pods[name] = {
            "metadata": {"name": name, "labels": {pods_manifest.SERVER: owner}},
            "spec": {"containers": [{"name": "sandbox"}]},
            "status": {},
        }

    async def job() -> None:
        await (await pods.start(tmp_path)).stop()

    machines.runner.run(job())
    assert list(cluster.pods) == ["others"]
    cluster.pods.clear()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TRIPLANE_ENVD_PODS_IMAGE": ""}, "set TRIPLANE_ENVD_PODS_IMAGE"),
        ({"TRIPLANE_ENVD_PODS_RUNTIME_CLASS": "nothing"}, "no RuntimeClass 'nothing'"),
        ({"KUBECONFIG": "/nowhere"}, "set KUBECONFIG"),
    ],
)
def test_what_is_missing_is_one_line_with_its_fix(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BackendUnavailable, match=words):
        asyncio.run(pods.start(tmp_path))


def test_a_wrong_token_is_told(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"][0]["user"]["token"] = "wrong"
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(BackendUnavailable, match="Unauthorized"):
        asyncio.run(pods.start(tmp_path))


@pytest.mark.parametrize("answer", [TOKEN, "wrong", None])
def test_user_of_a_kubeconfig_may_log_in_by_a_program(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    """answer: the token that the program prints; with None it fails."""
    version = "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": answer}}
    (tmp_path / "credential").write_text(json.dumps(credential))
    command = ["cat", str(tmp_path / "credential")] if answer else ["false"]
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"][0]["user"] = {"exec": {"apiVersion": version, "command": command[0], "args": command[1:]}}
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))

    async def job() -> str:
        backend = await pods.start(tmp_path)
        await backend.stop()
        return backend.name

    if answer == TOKEN:
        assert asyncio.run(job()) == "pods"
    else:
        with pytest.raises(BackendUnavailable, match="Unauthorized"):
            asyncio.run(job())


def test_an_api_server_that_is_gone_is_told_by_its_address(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(BackendUnavailable, match=r"http://127.0.0.1:1 does not answer read_runtime_class"):
        asyncio.run(pods.start(tmp_path))


def test_tls_with_a_client_certificate_carries_requests_and_streams(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "client"):
        certificate(tmp_path, name, authority)

    async def job() -> None:
        backend = await pods.start(tmp_path)  # starts a sandbox and runs a command in it
        await backend.stop()

    with pods_cluster(tmp_path / "containers", tls=tmp_path) as cluster:
        asyncio.run(job())
    assert cluster.pods == {}
