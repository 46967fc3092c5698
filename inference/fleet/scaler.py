"""KEDA's external scaler over a fleet, as gRPC (contracts/protos/keda.proto).

triplane-tokens   tokens in flight at all replicas, from all routers: prompts and expected outputs
triplane-queue    requests in flight beyond the capacity of their replica, and those of the last minute that found none

KEDA wants ceil(value / target) replicas for each, and takes the larger number. The trigger's metadata sets the targets:
tokensPerReplica, queuePerReplica. Read only, without key or TLS: keep its port in a private network.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

import grpc

from contracts.addresses import parse_addresses
from contracts.pb import keda_pb2, keda_pb2_grpc
from contracts.rpc.listening import OPTIONS, Listening
from inference.fleet.fleet import Fleet

TOKENS, QUEUE = "triplane-tokens", "triplane-queue"
TARGETS = {TOKENS: ("tokensPerReplica", 100_000.0), QUEUE: ("queuePerReplica", 8.0)}
"""Metric -> the key of the trigger's metadata with its target, and the default."""
LOOK_S = 1.0
"""Seconds between two looks of a stream."""
Context = grpc.aio.ServicerContext[object, object]


class Scaler(keda_pb2_grpc.ExternalScalerServicer):  # type: ignore[misc, unused-ignore]
    """Answers KEDA from the state of a fleet, in its event loop."""

    def __init__(self, fleet: Fleet) -> None:
        """fleet: of this process."""
        self._fleet = fleet

    async def IsActive(self, request: keda_pb2.ScaledObjectRef, context: Context) -> keda_pb2.IsActiveResponse:
        """Whether there are requests, open sessions, or requests that found no replica."""
        return keda_pb2.IsActiveResponse(result=self._is_active())

    async def StreamIsActive(
        self, request: keda_pb2.ScaledObjectRef, context: Context
    ) -> AsyncIterator[keda_pb2.IsActiveResponse]:
        """The answer of IsActive, now and whenever it changes."""
        said = None
        while True:
            if (active := self._is_active()) != said:
                said = active
                yield keda_pb2.IsActiveResponse(result=active)
            await asyncio.sleep(LOOK_S)

    async def GetMetricSpec(
        self, request: keda_pb2.ScaledObjectRef, context: Context
    ) -> keda_pb2.GetMetricSpecResponse:
        """Both metrics with their targets. INVALID_ARGUMENT for a target that is no positive number."""
        specs = []
        for name, (key, default) in TARGETS.items():
            text = request.scalerMetadata.get(key, str(default))
            try:
                target = float(text)
            except ValueError:
                target = math.nan
            if not 0 < target < math.inf:
                said = f"{key}={text!r}: must be a positive number, the {name} that one replica should have"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
            specs.append(keda_pb2.MetricSpec(metricName=name, targetSize=max(1, round(target)), targetSizeFloat=target))
        return keda_pb2.GetMetricSpecResponse(metricSpecs=specs)

    async def GetMetrics(self, request: keda_pb2.GetMetricsRequest, context: Context) -> keda_pb2.GetMetricsResponse:
        """Value of one metric. INVALID_ARGUMENT for an unknown one."""
        values: dict[str, Callable[[], int]] = {TOKENS: self._tokens, QUEUE: self._queue}
        name = request.metricName
        if name not in values:
            said = f"unknown metric {name!r}: ask for {' or '.join(values)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
        value = values[name]()
        found = keda_pb2.MetricValue(metricName=name, metricValue=value, metricValueFloat=value)
        return keda_pb2.GetMetricsResponse(metricValues=[found])

    def _is_active(self) -> bool:
        return any(view.requests or view.sessions or view.refused for view in self._fleet.views())

    def _tokens(self) -> int:
        return sum(sum(view.tokens.values()) for view in self._fleet.views())

    def _queue(self) -> int:
        views = self._fleet.views()
        joined = [each.joined for each in self._fleet.replicas.values() if each.joined is not None]
        over = (
            sum(view.requests.get(each.url, 0) for view in views) - each.capacity for each in joined if each.capacity
        )
        return sum(max(0, each) for each in over) + sum(view.refused for view in views)


async def serve_scaler(fleet: Fleet, address: str) -> None:
    """Serve until cancelled. Raises ConfigError for an address that can't be used."""
    (found,) = parse_addresses(address, "--scaler")[:1]
    server = grpc.aio.server(options=OPTIONS)
    keda_pb2_grpc.add_ExternalScalerServicer_to_server(Scaler(fleet), server)  # type: ignore[no-untyped-call, unused-ignore]
    Listening(found.target, insecure=True).listen(server)
    await server.start()
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)
