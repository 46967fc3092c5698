"""A collector of OpenTelemetry: takes spans as OTLP/HTTP (protobuf, opentelemetry-proto 1), and shows their tree."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from contracts import tracing


@dataclass
class Collector:
    """Spans that were received."""

    url: str
    spans: list[Any] = field(default_factory=list)
    by_id: dict[bytes, Any] = field(default_factory=dict)
    services: dict[bytes, str] = field(default_factory=dict)
    """Service of each span, by span id."""

    def named(self, name: str) -> list[Any]:
        """Spans with this name."""
        return [span for span in self.spans if span.name == name]

    def attributes(self, span: Any) -> dict[str, Any]:
        """Attributes of a span."""
        values = {each.key: each.value for each in span.attributes}
        return {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}

    def parent(self, span: Any) -> Any | None:
        """Parent of a span; None: it has none, or it was not received."""
        return self.by_id.get(span.parent_span_id)

    def path(self, span: Any) -> list[str]:
        """Names from the first span of the trace to this one."""
        above = self.parent(span)
        return [*(self.path(above) if above is not None else ()), span.name]

    def orphans(self) -> list[str]:
        """Names of the spans whose parent was not received."""
        return [span.name for span in self.spans if span.parent_span_id and self.parent(span) is None]

    def names(self) -> Counter[str]:
        """Number of spans by name."""
        return Counter(span.name for span in self.spans)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector at a port of this machine; 0 picks a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    found.spans.append(span)
                    found.by_id[span.span_id], found.services[span.span_id] = span, about["service.name"]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def collecting(patch: pytest.MonkeyPatch, **variables: str) -> Iterator[Collector]:
    """A collector that this process and its children send their spans to. variables: further ones, by name."""
    with collector() as found:
        forget(patch)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setattr(tracing, "FLUSH_S", 60.0)  # a busy machine loses no span
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            yield found
        finally:
            tracing.stop()


def forget(patch: pytest.MonkeyPatch) -> None:
    """Turn tracing off, and remove the variables that ask for it."""
    tracing.stop()
    for name in [name for name in os.environ if name.startswith("OTEL_") or name == "TRACEPARENT"]:
        patch.delenv(name)
