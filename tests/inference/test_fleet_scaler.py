"""KEDA's external scaler, asked by a gRPC client as KEDA asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.pb import keda_pb2, keda_pb2_grpc
from tests.http_client import HTTP
from tests.inference.conftest import write_checkpoint
from tests.inference.test_fleet_routing import Load, process, state
from tests.inference.test_route_command import Routed, routed
from tests.inference.test_routed_engine import served
from tests.ports import free_port
from tests.vllm.fleet_servers import until

pytestmark = pytest.mark.slow


@dataclass
class Scaled:
    face: Routed
    keda: Any
    stack: ExitStack

    def metric(self, name: str) -> float:
        asked = keda_pb2.GetMetricsRequest(scaledObjectRef=reference(), metricName=name)
        (found,) = self.keda.GetMetrics(asked, timeout=30).metricValues
        assert found.metricName == name and found.metricValue == found.metricValueFloat
        return float(found.metricValueFloat)


def reference(**metadata: str) -> keda_pb2.ScaledObjectRef:
    return keda_pb2.ScaledObjectRef(name="engines", namespace="default", scalerMetadata=metadata)


@pytest.fixture
def scaled() -> Iterator[Scaled]:
    port = free_port()
    with ExitStack() as stack:
        face = stack.enter_context(routed([], "--scaler", f"127.0.0.1:{port}"))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        grpc.channel_ready_future(channel).result(30)
        yield Scaled(face, keda_pb2_grpc.ExternalScalerStub(channel), stack)


def test_the_first_request_wakes_an_empty_fleet_and_load_scales_it(scaled: Scaled, tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "first", 0)
    assert not scaled.keda.IsActive(reference(), timeout=30).result
    active = scaled.keda.StreamIsActive(reference(), timeout=120)
    assert next(active).result is False
    assert scaled.face.post("/v1/completions", {"prompt": [1]}).status_code == 503
    assert next(active).result is True
    assert scaled.metric("triplane-queue") == 1 and scaled.metric("triplane-tokens") == 0
    url = scaled.stack.enter_context(served(policy, "first")).removesuffix("/v1")
    scaled.stack.enter_context(process("join", "--replica", url, "--router", scaled.face.url, "--capacity", "1"))
    until(lambda: [row["state"] for row in state(scaled.face).values()] == ["serving"])
    load = Load(scaled.face, "talk", 5)
    until(lambda: scaled.metric("triplane-tokens") >= 5 * 8 and scaled.metric("triplane-queue") >= 1 + 3)
    load.end()
    until(lambda: scaled.metric("triplane-tokens") == 0)
    assert HTTP.get(f"{scaled.face.url}/fleet", timeout=30).json()["pinned"] == {"first": 0}
    active.cancel()


def test_targets_come_from_the_trigger_and_bad_ones_are_named(scaled: Scaled) -> None:
    found = scaled.keda.GetMetricSpec(reference(tokensPerReplica="2500.5"), timeout=30).metricSpecs
    assert [(each.metricName, each.targetSizeFloat) for each in found] == [
        ("triplane-tokens", 2500.5),
        ("triplane-queue", 8.0),
    ]
    for text in ("0", "-1", "many", "inf", "nan"):
        with pytest.raises(grpc.RpcError, match=r"queuePerReplica=.*must be a positive number") as refused:
            scaled.keda.GetMetricSpec(reference(queuePerReplica=text), timeout=30)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError, match="unknown metric 'x': ask for triplane-tokens or triplane-queue"):
        scaled.metric("x")


def test_a_compressed_request_is_refused(scaled: Scaled) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        scaled.keda.IsActive(reference(padding="0" * 100_000), timeout=30, compression=grpc.Compression.Gzip)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
