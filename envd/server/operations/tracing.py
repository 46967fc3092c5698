"""OpenTelemetry spans, one per call, joined to the caller's trace by the W3C `traceparent` metadata; see
`contracts.tracing` for the variables that ask for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contracts import tracing

_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that a server's span counts as errors. Source: OpenTelemetry semantic conventions, gRPC server spans."""


class Tracing:
    """Observer with a span for each call. A thread exports them in batches, and drops those that no receiver takes."""

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """See `envd.server.observing.Observer`."""
        service, _, name = method.partition("/")
        span = tracing.span(
            *tracing.grpc_call(f"triplane.envd.v1.{service}", name),
            "server",
            parent=tracing.parent_of(context.invocation_metadata() or ()),
        )

        def end(code: str) -> None:
            span.set({tracing.GRPC_CODE: code})
            span.end(code if code in _FAULTS else None)

        return end

    def stop(self) -> None:
        """Export the remaining spans and end the exporting thread."""
        tracing.stop()


def start_tracing() -> Tracing | None:
    """Start tracing as the environment configures it; None if it asks for none, or for what can't be had."""
    return Tracing() if tracing.start("envd") else None
