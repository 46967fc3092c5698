"""OpenTelemetry spans, one per call, joined to the caller's trace by the W3C `traceparent` metadata.

Tracing is on if the packages are installed (`pip install triplane[tracing]`) and a standard variable names a receiver:
OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and the other
standard variables apply too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that a server's span counts as errors. Source: OpenTelemetry semantic conventions, gRPC server spans."""
_log = logging.getLogger("envd")


class Tracing:
    """Observer with a span for each call. A thread exports them in batches, and drops those that no receiver takes."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._trace = provider, trace
        self._tracer = provider.get_tracer("envd")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """See `envd.server.observing.Observer`."""
        carrier = {
            key: value for key, value in context.invocation_metadata() or () if key in ("traceparent", "tracestate")
        }
        service, _, name = method.partition("/")
        span = self._tracer.start_span(
            f"triplane.envd.v1.{method}",
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.service": f"triplane.envd.v1.{service}", "rpc.method": name},
        )

        def end(code: str) -> None:
            span.set_attribute("rpc.grpc.status_code", code)
            if code in _FAULTS:
                span.set_status(self._trace.StatusCode.ERROR, code)
            span.end()

        return end

    def stop(self) -> None:
        """Export the remaining spans and end the exporting thread."""
        self._provider.shutdown()


def start_tracing() -> Tracing | None:
    """Start tracing as the environment configures it; None if it names no receiver.

    If the packages are missing, this logs an error and returns None.
    """
    if (
        not any(os.environ.get(name) for name in _ENDPOINTS)
        or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.error("no spans: %s is not installed: pip install triplane[tracing]", error.name)
        return None
    resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "envd")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
