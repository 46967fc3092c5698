"""Spans of requests to engines, with the names of OpenTelemetry's semantic conventions for generative AI."""

from __future__ import annotations

from collections.abc import Sequence

from contracts import tracing
from inference.engines.base import SamplingParams


def request_span(prompt: int, params: SamplingParams) -> tracing.Span:
    """Begin the span of a request. prompt: tokens."""
    return tracing.span(
        "text_completion",
        {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "triplane",
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.input_tokens": prompt,
        },
        "client",
    )


def completed(tokens: int, reason: str | None, spans: Sequence[tuple[str, int, int]]) -> tracing.Attributes:
    """Attributes of a request that has ended. tokens: sampled. spans: of policy versions, see Completion."""
    return {
        "gen_ai.usage.output_tokens": tokens,
        "gen_ai.response.finish_reasons": (reason,) if reason else None,
        "gen_ai.response.model": spans[-1][0] if spans else None,
    }
