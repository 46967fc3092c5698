"""The API server accepts the chart's objects as each supported version of Kubernetes is told to render them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.render_chart import render
from tests.kubernetes.cluster.world import World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 37))
IMAGE = f"registry.example/vllm@sha256:{'0' * 64}"
ENGINE = {"experiment": "qwen3-30b-a3b", "replicas": 2, "gpus": 2, "model": "/models/qwen3", "image": IMAGE}
EVERYTHING: dict[str, Any] = {
    "samplers": [{"experiment": "tiny", "replicas": 2}],
    "engines": [ENGINE],
    "redis": {"enabled": True, "existingSecret": "redis"},
    "routers": [{"experiment": "tiny", "to": "samplers", "replicas": 2, "keySecret": "fleet", "webhookSecret": "hook"}],
    "bridges": [{"experiment": "tiny", "keySecret": "bridge", "tlsSecret": "tls", "policyClaim": "trainer"}],
    "trainer": {"jobset": True},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_api_server_accepts_every_object(world: World, version: str) -> None:
    router = EVERYTHING["routers"][0] | ({"autoscale": {"max": 2}} if has_keda(world) else {})
    for values in ({}, EVERYTHING | {"routers": [router]}):
        objects = render(values, "another", world.namespace, version)
        said = world.apply(objects, "--dry-run=server")
        assert len(said.splitlines()) == len(objects), said


def has_keda(world: World) -> bool:
    """Whether the cluster knows the objects of KEDA."""
    return "scaledobjects" in world.kubectl("api-resources", "--api-group=keda.sh", "--output=name")
