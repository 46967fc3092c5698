"""Metrics tell what a real server did, spans reach a receiver, and neither costs a call much."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
import urllib.request
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from envd.client import ToolCall
from envd.errors import BackendUnavailable, EnvdError
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.server.observing import Observing
from envd.server.operations.tracing import start_tracing
from tests.otlp import collecting, forget
from tests.ports import free_port

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for each in families
        for sample in each.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, tuple(sorted(labels.items()))), 0.0)


def test_metrics_and_spans_tell_what_a_server_did(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"

    async def job(address: str) -> tuple[Samples, Samples, tuple[bool, bool]]:
        async with OperationsClient(address) as client:
            template = await client.put_template({"a.py": b"x = 1\n"})
            sandboxes = [await client.create(template) for _ in range(3)]
            for sandbox in sandboxes:
                await sandbox.call(ToolCall("exec", {"command": "true"}))
                await sandbox.call(ToolCall("read", {"path": "a.py"}))
            await sandboxes[0].batch([ToolCall("read", {"path": "a.py"}), ToolCall("list", {})])
            await sandboxes[0].call(ToolCall("no such tool \n", {}))
            for rules in ("isolation: machine", "no rules"):
                with pytest.raises(EnvdError):
                    await client.create(template, rules=rules)
            (backend,) = (await client.info()).backends
            pauses, grouped = "pause" in backend.features, "memory" in backend.limits_enforced
            if pauses:
                await sandboxes[1].pause()
            await client.verify(template, b"", {"test_a.py": b"def test_a(): pass\n"}, ["test_a.py::test_a"])
            async with grpc.aio.insecure_channel(address) as channel:
                info: Any = channel.unary_unary("/triplane.envd.v1.Operations/Info")
                await info(b"", metadata=(("traceparent", parent),))
                with pytest.raises(grpc.aio.AioRpcError):
                    nothing: Any = channel.unary_unary("/triplane.envd.v1.Sandboxes/Nothing")
                    await nothing(b"")
            alive = await asyncio.to_thread(scrape, port)
            for sandbox in sandboxes:
                await sandbox.close()
            return alive, await asyncio.to_thread(scrape, port), (pauses, grouped)

    options = ["--metrics", f"127.0.0.1:{port}", "--pool", "1"]
    with collecting(monkeypatch) as found, LocalEnvd("namespaces", options=options) as server:
        alive, after, (pauses, grouped) = asyncio.run(job(server.address))
    create = "Sandboxes/Create"
    assert value(alive, "envd_calls_total", method=create, code="OK") == 3
    assert value(alive, "envd_calls_total", method=create, code="PERMISSION_DENIED") == 1
    assert value(alive, "envd_calls_total", method=create, code="INVALID_ARGUMENT") == 1
    assert (
        value(alive, "envd_call_seconds_count", method=create) == 5
        and value(alive, "envd_call_seconds_sum", method=create) > 0
    )
    assert value(alive, "envd_call_seconds_count", method="Verifier/Verify") == 1
    for tool, count in {"exec": 3, "read": 3, "mixed": 1, "unknown": 1}.items():
        assert value(alive, "envd_tool_seconds_count", tool=tool) == count
    live = [value(alive, "envd_sandboxes", backend="namespaces", state=state) for state in ("running", "paused")]
    assert live == ([2, 1] if pauses else [3, 0])
    # without control groups nobody counts it
    assert (value(alive, "envd_sandboxes_memory_bytes", backend="namespaces") > 0) == grouped
    assert value(alive, "envd_audit_events_total", kind="policy.denied") == 1
    takes = [value(alive, "envd_pool_takes_total", backend="namespaces", result=result) for result in ("hit", "miss")]
    assert sum(takes) == 3 and takes[1] >= 1
    assert sum(each for (name, _), each in after.items() if name == "envd_sandboxes") == 0
    assert not any("Nothing" in label for _, labels in alive for _, label in labels)
    names = {span.name.rpartition(".")[2] for span in found.spans if found.services[span.span_id] == "envd"}
    assert {"Sandboxes/Create", "Tools/Batch", "Verifier/Verify", "Operations/Info"} <= names
    joined = [span for span in found.spans if span.trace_id.hex() == "ab" * 16]
    assert [(span.name, span.parent_span_id.hex()) for span in joined] == [
        ("triplane.envd.v1.Operations/Info", "cd" * 8)
    ]


def test_an_address_that_is_taken_or_none_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, words in ((f"127.0.0.1:{port}", "choose another port"), ("here", "write HOST:PORT")):
            with pytest.raises(BackendUnavailable, match=words) as caught:
                with LocalEnvd("plain", options=["--metrics", address]):
                    pass
            assert "\n" not in str(caught.value)


def test_without_a_receiver_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    assert start_tracing() is None


class _Counting:
    def begin(self, method: str, request: Any, context: Any) -> Any:
        return lambda code: None


def test_watching_costs_a_call_some_microseconds() -> None:
    async def method(request: Any, context: Any) -> Any:
        return request

    handler: Any = grpc.unary_unary_rpc_method_handler(method)

    async def found(details: Any) -> Any:
        return handler

    class Details:
        method = "/triplane.envd.v1.Operations/Info"

    details: Any = Details()

    async def seconds(interceptor: Observing | None) -> float:
        started = time.perf_counter()
        for _ in range(500):
            chosen = (
                await found(details) if interceptor is None else await interceptor.intercept_service(found, details)
            )
            await chosen.unary_unary(None, None)
        return (time.perf_counter() - started) / 500

    async def both() -> float:
        pairs = [(await seconds(Observing([_Counting()])), await seconds(None)) for _ in range(20)]
        return statistics.median(one - other for one, other in pairs)

    assert asyncio.run(both()) < 200e-6
