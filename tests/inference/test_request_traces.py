"""Requests to engines carry their trace to servers, and tell which replica the router chose."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from contracts import tracing
from inference.engines import BuiltinConfig, EngineConfig, OpenAIConfig, RoutedConfig, open_engine
from inference.engines.base import SamplingParams
from inference.engines.guarded import GuardedServer
from inference.engines.spans import completed, request_span
from tests.inference.conftest import WritePolicy
from tests.inference.test_route_command import routed
from tests.inference.test_routed_engine import served
from tests.otlp import Collector, collecting

PARAMS = SamplingParams(1.0, 8, 3, group="g")


def ask(spec: EngineConfig, policy: Path, *, stream: bool = False) -> None:
    """One request through an engine, within a span."""

    async def run() -> None:
        engine = open_engine(spec, policy, "v1")
        try:
            with request_span(3, PARAMS) as span:
                if stream:
                    assert [piece async for piece in engine.stream([5, 6, 7], PARAMS)]
                else:
                    made = await engine.generate([5, 6, 7], PARAMS)
                    span.set(completed(len(made.token_ids), made.finish_reason, made.spans))
        finally:
            await engine.close()

    asyncio.run(run())
    tracing.flush()


def choices(found: Collector, name: str) -> list[dict[str, Any]]:
    """Choices of the router within the spans of this name."""
    events = [event for span in found.named(name) for event in span.events]
    assert {event.name for event in events} <= {"router.choice"}
    return [found.attributes(event) for event in events]


def test_a_replica_that_is_chosen_is_in_the_span_of_the_request(
    write_policy: WritePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy("policy")
    replicas = tuple(BuiltinConfig(threads=1) for _ in range(2))
    with collecting(monkeypatch) as found:
        ask(RoutedConfig(kind="routed", replicas=replicas), policy)
        (choice,) = choices(found, "text_completion")
        assert choice["triplane.replica"] in ("replica 0", "replica 1")
        assert (choice["triplane.prompt_tokens"], choice["triplane.cached_tokens"]) == (3, 0)
        about = found.attributes(found.named("text_completion")[0])
        assert about["gen_ai.response.model"] == "v1" and about["gen_ai.usage.output_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_of_ours_continues_the_trace_of_its_client(
    stream: bool, write_policy: WritePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy("policy")
    with collecting(monkeypatch) as found, served(policy, "v1") as url:
        ask(OpenAIConfig(kind="openai", base_url=url, model="policy"), policy, stream=stream)
        (span,) = found.named("POST /v1/completions")
        assert found.path(span) == ["text_completion", "POST /v1/completions"]
        assert found.attributes(span)["http.response.status_code"] == 200 and not found.orphans()
        assert set(found.names()) == {"text_completion", "POST /v1/completions"}, "what is polled has none"


def test_a_server_that_is_started_is_told_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['TRACEPARENT'])"]
    with collecting(monkeypatch), tracing.span("step"):
        server = GuardedServer(command, lambda scratch: os.environ)
        server._guard.wait(60)
        assert server.last_words() == tracing.carrier()["traceparent"]
        server.stop()


@pytest.mark.slow
def test_a_router_is_between_its_client_and_the_server(
    write_policy: WritePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = write_policy("policy")
    with collecting(monkeypatch) as found, served(policy, "v1") as url:
        with routed([url.removesuffix("/v1")]) as router:
            ask(OpenAIConfig(kind="openai", base_url=f"{router.url}/v1", model="policy"), policy)
            assert router.end() == 0
        both = found.named("POST /v1/completions")
        assert sorted(found.services[span.span_id] for span in both) == ["router", "triplane"]
        server = next(span for span in both if found.services[span.span_id] == "triplane")
        assert found.path(server) == ["text_completion", *["POST /v1/completions"] * 2] and not found.orphans()
        (choice,) = choices(found, "POST /v1/completions")
        assert choice["triplane.replica"] == url.removesuffix("/v1")
