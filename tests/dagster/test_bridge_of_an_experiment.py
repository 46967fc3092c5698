"""`triplane bridge` hosts an experiment's episodes as its rollouts step plays them, speaks TLS, and runs with the
arguments of the Helm chart.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from contracts.artifacts import open_artifact
from contracts.store import open_store
from inference.bridge.client import AccessDenied, Bridge, Sampling
from resources.refs import read_artifact
from resources.registry import Registry
from tests.bridge.hosted_parts import check_equal
from tests.dagster.dagster_world import World
from tests.deploy.chart_pods import templates
from tests.deploy.render_chart import render
from tests.envd.test_services_tls import certificate
from tests.http_client import HTTP
from tests.inference.test_route_command import routed
from tests.inference.test_routed_engine import served
from tests.ports import free_port

TRAINER = {"ca": "ca.crt", "cert": "trainer.crt", "key": "trainer.key"}
TINY = Path(__file__).with_name("tiny.yaml")


def rows(world: World, asset: str, table: str) -> list[dict[str, Any]]:
    found = read_artifact(world.store, "tiny", asset, "0000")
    assert found is not None
    return found.table(f"{table}.parquet").to_pylist()


@pytest.mark.slow
def test_hosted_episodes_over_tls_are_the_recorded_rollouts(ran: World, tmp_path: Path) -> None:
    episodes, sequences = rows(ran, "rollouts", "episodes"), rows(ran, "rollouts", "sequences")
    rewards = {each["episode_id"]: each["reward"] for each in rows(ran, "rewards", "rewards")}
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "trainer"):
        certificate(tmp_path, name, authority)
    command = [sys.executable, "-m", "triplane_dagster.cli", "bridge", "-e", str(TINY), "--listen", "localhost:0"]
    command += ["--policy", episodes[0]["policy_version"]]
    for option, file in (("cert", "server.crt"), ("key", "server.key"), ("client-ca", "ca.crt")):
        command += [f"--tls-{option}", str(tmp_path / file)]
    ours = {"tls_ca": tmp_path / "ca.crt", "tls_cert": tmp_path / "trainer.crt", "tls_key": tmp_path / "trainer.key"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            found = re.fullmatch(r"policy ([0-9a-f]{64}) at (localhost:\d+)\n", served.stdout.readline())
            assert found is not None
            with Bridge(found[2], **ours) as bridge:
                for row, sequence in zip(episodes, sequences, strict=True):
                    with bridge.start_task(row["task_id"], seed=row["seed"]) as episode:
                        while not episode.done:
                            episode.step()
                        check_equal(episode.end(), (row, sequence, rewards[row["episode_id"]]))
        finally:
            served.terminate()
    assert len(episodes) > 8 and served.returncode == 0


@pytest.mark.slow
def test_a_bridge_waits_for_the_first_policy_and_tasks_and_for_the_file(untouched: Path, tmp_path: Path) -> None:
    store, file = tmp_path / "store", tmp_path / "policy"
    command = [sys.executable, "-m", "triplane_dagster.cli", "bridge", "-e", str(TINY), "--listen", "localhost:0"]
    command += ["--policy", "base", "--policy-file", str(file)]
    environment = {**os.environ, "TRIPLANE_STORE": str(store)}
    said = "store .* has no tiny/base_policy: materialize it first\n"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and re.fullmatch(f"error: {said}", done.stderr)
    with waiting([*command, "--wait=600"], environment) as (process, stderr, _):
        assert re.fullmatch(f"waiting: {said}", stderr.readline())
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    with waiting([*command, "--wait=600"], environment) as (process, stderr, stdout):
        assert re.fullmatch(f"waiting: {said}", stderr.readline())
        for ignored in ("pointers", ""):  # they name what is there by then
            shutil.copytree(untouched, store, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ignored))
        assert f"waiting: --policy-file {file} does not exist\n" in stderr
        base = read_artifact(open_store(str(store)), "tiny", "base_policy")
        assert base is not None
        file.write_text(base.ref.digest)
        assert stdout.readline().startswith(f"policy {base.ref.digest} at localhost:")


@contextmanager
def waiting(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """A process, its stderr and its stdout."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            yield process, process.stderr, process.stdout
        finally:
            process.kill()


@contextmanager
def pod(values: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """The container of a bridge of the chart as a process, whose volumes are folders below `folder`.

    Yields the addresses of the bridge and of its metrics. Fails unless SIGTERM ends it in the pod's time.
    """
    spec = dict(templates(render({"bridges": [{"experiment": "tiny", "keySecret": "keys", **values}]})))
    (container,) = spec["triplane-bridge-tiny"]["spec"]["containers"]
    address, metrics = f"localhost:{free_port()}", f"127.0.0.1:{free_port()}"
    here = {"0.0.0.0:7080": address, "0.0.0.0:9465": metrics}
    here |= {each["mountPath"]: str(folder / each["name"]) for each in container["volumeMounts"]}
    command = list(container["command"])
    for inside, outside in here.items():
        command = [word.replace(inside, outside) for word in command]
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TRIPLANE_EXPERIMENTS": str(TINY.parent),
    }
    with subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None and f" at {address}" in served.stdout.readline()
            yield address, metrics
            served.send_signal(signal.SIGTERM)
            assert served.wait(spec["triplane-bridge-tiny"]["spec"]["terminationGracePeriodSeconds"]) == 0
        finally:
            served.kill()


@pytest.mark.slow
def test_a_bridge_of_the_chart_asks_for_its_key_and_keeps_episodes_over_a_restart(ran: World, tmp_path: Path) -> None:
    for name in ("keys", "tls", "policies"):
        (tmp_path / name).mkdir()
    (tmp_path / "keys" / "keys").write_text("the key of the trainer\n")
    authority = certificate(tmp_path / "tls", "ca", None)
    for name in ("tls", "trainer"):
        certificate(tmp_path / "tls", name, authority)
    key = {"key": "the key of the trainer"}
    tls = {f"tls_{name}": tmp_path / "tls" / file for name, file in TRAINER.items()}
    with pod({"tlsSecret": "tls", "clientCertificates": True}, tmp_path) as (address, metrics):
        with pytest.raises(AccessDenied), Bridge(address, key="another key of 16", **tls) as bridge:
            bridge.info()
        with Bridge(address, **key, **tls) as bridge:
            assert bridge.info().hosted_tasks > 1
            episode = bridge.start([1, 2, 3], sampling=Sampling(max_tokens=8))
            turns = [episode.step()]
            name = episode.release()
        assert "bridge_episodes" in HTTP.get(f"http://{metrics}/metrics", timeout=60).text
    (tmp_path / "policies" / "policy").write_text(turns[0].spans[0].version)
    with pod({"policyClaim": "trainer", "policy": "base"}, tmp_path) as (address, _):
        with grpc.insecure_channel(address) as channel:  # as a kubelet
            health: Any = health_pb2_grpc.HealthStub(channel)
            asked = health.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert asked.status == health_pb2.HealthCheckResponse.SERVING
        with Bridge(address, **key) as bridge:
            again = bridge.attach(name, [1, 2, 3], turns)
            turns.append(again.step([4, 5]))
            again.release()
    live = Registry(ran.store, "tiny").live()
    assert live is not None
    policy = open_artifact(ran.store, live.policy).directory()
    with served(policy, live.policy.digest) as server, routed([server.removesuffix("/v1")]) as router:
        engine = [f"engine.{each}" for each in ("kind=openai", f"base_url={router.url}/v1")]
        with pod({"set": engine}, tmp_path) as (address, _), Bridge(address, **key) as bridge:
            again = bridge.attach(name, [1, 2, 3], turns)
            turns.append(again.step([6]))
            again.end(reward=1.0)
        assert router.metric("route_requests_total", code="200") >= 1
    assert len({span.version for turn in turns for span in turn.spans}) == 1
