"""A fleet of a StatefulSet that is scaled to zero between leases, against a small API server.

The server speaks statefulsets/scale, pods and events of Kubernetes 1.36. Its pods are stub vLLM servers, one on each of
127.0.0.1, 127.0.0.2, ..., all on one port, behind a DNS name.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from contracts.kubernetes_client import ClusterError
from inference.engines import SamplingParams, VllmConfig, fleet, open_engine
from inference.engines.fleet import give_back_fleet
from inference.engines.scaling import Scale
from inference.errors import EngineUnreachable
from tests.ports import free_port
from tests.vllm.fleet_servers import StubServer

pytest.importorskip("kubernetes")
pytestmark = [pytest.mark.anyio, pytest.mark.slow]
FIRST = "a" * 64
APPS, CORE = "/apis/apps/v1/namespaces/ns", "/api/v1/namespaces/ns"
SCALE = f"{APPS}/statefulsets/engines/scale"
Policies = tuple[Path, Path]


class Cluster:
    """One StatefulSet `engines`."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.servers = [StubServer(directory, f"127.0.0.{index + 1}", port) for index in range(2)]
        self.replicas, self.calls = 0, list[str]()
        self.forbidden = self.unschedulable = False

    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        for index, each in enumerate(self.servers):
            if index >= replicas or self.unschedulable:
                each.stop()
            elif not each.is_running():
                each.start()

    def addresses(self) -> list[str]:
        return [each.host for each in self.servers if each.is_running()]


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.cluster.forbidden:
            self.cluster.scale(body["spec"]["replicas"])
        self.answer()

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.cluster.calls.append(f"{self.command} {path}")
        status, body = 200, dict[str, Any]()
        if self.cluster.forbidden:
            status = 403
            body = {"message": 'statefulsets.apps "engines" is forbidden: cannot patch resource "statefulsets/scale"'}
        elif path == SCALE:
            body = {"kind": "Scale", "metadata": {"name": "engines"}, "spec": {"replicas": self.cluster.replicas}}
        elif path == f"{CORE}/pods":
            body = {"kind": "PodList", "items": [self.pod(index) for index in range(self.cluster.replicas)]}
        elif path == f"{CORE}/events":
            body = {"kind": "EventList", "items": []}
        else:
            status, body = 404, {"message": f'statefulsets.apps "{path.split("/")[-2]}" not found'}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def pod(self, index: int) -> dict[str, Any]:
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "engines", "uid": "1"}
        said = {"reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}
        waiting = [{"type": "PodScheduled", "status": "False", **said}] if self.cluster.unschedulable else []
        return {
            "metadata": {"name": f"engines-{index}", "ownerReferences": [owner]},
            "status": {"conditions": waiting},
        }

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def cluster(policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster(policies[0])
    handler = type("Bound", (Handler,), {"cluster": found})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "clusters": [{"name": "c", "cluster": {"server": place}}],
        "users": [{"name": "u", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(fleet, "WATCH_S", 0.2)
    usual = socket.getaddrinfo

    def lookup(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        """DNS of the headless Service."""
        if host != "engines.ns.svc":
            return usual(host, port, *rest, **more)
        if not found.addresses():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found.addresses()]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    yield found
    server.shutdown()
    server.server_close()
    for each in found.servers:
        each.stop()


def config_of(cluster: Cluster, **changes: object) -> VllmConfig:
    address = f"dns:engines.ns.svc:{cluster.servers[0].port}"
    values = {"base_url": address, "idle": "scale", "statefulset": "engines", "replicas": 2, "startup_timeout_s": 60}
    return VllmConfig.model_validate(values | changes)


async def test_fleet_is_scaled_up_for_a_lease_and_to_zero_after_it(cluster: Cluster, policies: Policies) -> None:
    for _ in range(2):
        engine = open_engine(config_of(cluster), policies[0], FIRST)
        assert await engine.version() == FIRST and cluster.replicas == 2
        assert (await engine.generate([1, 2], SamplingParams(1.0, 4, 1))).spans == [(FIRST, 0, 4)]
        await engine.close()
        await give_back_fleet(config_of(cluster))
        assert cluster.replicas == 0 and cluster.addresses() == []
    assert {call for call in cluster.calls if "scale" in call} == {f"GET {SCALE}", f"PATCH {SCALE}"}


async def test_servers_that_come_later_join(cluster: Cluster, policies: Policies) -> None:
    engine = open_engine(config_of(cluster, replicas=1), policies[0], FIRST)
    await engine.version()
    assert isinstance(engine, fleet.FleetEngine) and len(engine.serving()) == 1
    cluster.scale(2)
    for _ in range(300):
        if len(engine.serving()) == 2:
            break
        await fleet.asyncio.sleep(0.1)
    assert cluster.servers[1].url in engine.serving() and cluster.servers[1].version() == FIRST
    await engine.close()


async def test_pods_that_do_not_start_end_the_wait_with_the_clusters_words(
    cluster: Cluster, policies: Policies
) -> None:
    cluster.unschedulable = True
    engine = open_engine(config_of(cluster, startup_timeout_s=2), policies[0], FIRST)
    with pytest.raises(EngineUnreachable, match=r"within 2 s.*engines-0: Unschedulable: 0/2 nodes.*nvidia\.com/gpu"):
        await engine.version()
    await engine.close()


def test_missing_right_and_missing_statefulset_are_named(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"can't scale statefulset ns/other to 1: .*not found \(404\)"):
        Scale("other").set(1)
    cluster.forbidden = True
    with pytest.raises(ClusterError, match=r"statefulsets/scale.*\(403\): grant the right"):
        Scale("engines").set(1)
