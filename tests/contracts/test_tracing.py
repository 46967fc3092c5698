"""Spans reach a collector as one tree, ask for nothing while tracing is off, and never hold up the work."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import subprocess
import sys
import time

import pytest

from contracts import tracing
from tests.otlp import collecting, collector, forget
from tests.ports import free_port


def test_spans_are_a_tree_across_tasks_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "from contracts import tracing\nwith tracing.service('child'), tracing.span('c', {'n': 1}): pass"

    async def work() -> None:
        async def one(number: int) -> None:
            with tracing.span("task", {"triplane.turn": number, "unknown": None}):
                await asyncio.sleep(0.01)

        await asyncio.gather(one(0), one(1))
        environment = {**os.environ, **tracing.environment()}
        await asyncio.to_thread(subprocess.run, [sys.executable, "-c", child], env=environment, check=True)

    with collecting(monkeypatch) as found:
        with tracing.span("root"):
            asyncio.run(work())
        tracing.flush()
        (root,) = found.named("root")
        assert found.names() == {"root": 1, "task": 2, "c": 1} and not found.orphans()
        assert {span.trace_id for span in found.spans} == {root.trace_id} and not root.parent_span_id
        assert [found.path(span) for span in found.named("task")] == [["root", "task"]] * 2
        assert sorted(str(found.attributes(span)) for span in found.named("task")) == [
            "{'triplane.turn': 0}",
            "{'triplane.turn': 1}",
        ]
        assert [found.services[span.span_id] for span in (root, found.named("c")[0])] == ["triplane", "child"]


def test_a_process_sends_its_spans_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch, OTEL_BSP_SCHEDULE_DELAY="600000", OTEL_SERVICE_NAME="mine") as found:
        code = "from contracts import tracing\nwith tracing.span('last'): pass"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert found.names() == {"last": 1} and not done.stderr
        assert set(found.services.values()) == {"mine"}


def test_an_error_is_told_by_its_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as found:
        with pytest.raises(ValueError), tracing.span("failed"):
            raise ValueError("the prompt was: secret")
        with pytest.raises(KeyboardInterrupt), tracing.span("interrupted"):
            raise KeyboardInterrupt
        tracing.flush()
        assert found.attributes(found.named("failed")[0]) == {"error.type": "ValueError"}
        assert [found.named(name)[0].status.code for name in ("failed", "interrupted")] == [2, 0]
        assert b"secret" not in b"".join(span.SerializeToString() for span in found.spans)


def test_a_run_and_its_steps_meet_without_being_told_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as found:
        with tracing.span("step", parent=tracing.run_context("one")):
            pass
        with tracing.span("run", run_id="one"):
            assert tracing.run_context("one") == tracing.carrier()
        tracing.flush()
        (step,), (run,) = found.named("step"), found.named("run")
        assert found.path(step) == ["run", "step"] and run.trace_id.hex() == tracing.trace_id("one")
        assert tracing.trace_id("two") != tracing.trace_id("one")


def test_a_share_of_the_runs_is_sampled_and_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    share = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    with collecting(monkeypatch, **share) as found:
        for number in range(100):
            with tracing.span("step", parent=tracing.run_context(f"run {number}")):
                pass
            with tracing.span("run", run_id=f"run {number}"), tracing.span("step"):
                pass
        tracing.stop()
        assert found.names()["step"] == 2 * found.names()["run"] and not found.orphans()
        assert 25 < found.names()["run"] < 75


def test_ids_are_no_draw_of_the_seeded_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as found:
        for _ in range(2):
            random.seed(7)
            with tracing.span("seeded"):
                drawn = random.random()
            assert drawn == random.Random(7).random()
        tracing.flush()
        assert len({span.span_id for span in found.spans}) == 2


def test_without_a_collector_no_span_is_made_and_no_package_loaded() -> None:
    code = (
        "import sys; from contracts import tracing; first = tracing.span('turn', {'triplane.turn': 1});"
        " print(tracing.span('call', kind='client') is first, tracing.carrier(), 'opentelemetry' in sys.modules)"
    )
    asked = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    said = subprocess.run([sys.executable, "-c", code], env=asked, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["True", "{}", "False"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_loaded_unless_it_is_asked_for(variables: dict[str, str]) -> None:
    code = (
        "import sys\nfrom contracts import tracing\n"
        "with tracing.span('s', {'a': 1}) as span: span.set({'b': 2}); tracing.event('e', {})\n"
        "assert not tracing.carrier() and not tracing.environment() and not tracing.is_on()\n"
        "tracing.flush(); tracing.stop()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    subprocess.run([sys.executable, "-c", code], env={**clean, **variables}, check=True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "write otlp, console or none"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size"),
    ],
)
def test_what_can_not_be_had_is_one_line(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not tracing.start("test") and not tracing.is_on()
    (record,) = caplog.records
    assert words in record.message and "no spans" in record.message
    tracing.stop()


@pytest.mark.parametrize("deaf", [False, True])
def test_a_dead_collector_costs_one_warning_and_a_bounded_wait(
    deaf: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """deaf: it takes connections and never answers; else nobody listens."""
    forget(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if deaf else free_port()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:password@127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setattr(tracing, "FLUSH_S", 1.0)
        began = time.monotonic()
        for _ in range(5):
            with tracing.span("lost"):
                pass
            tracing.flush()
        assert 0.9 < time.monotonic() - began < 1.9
        for _ in range(3000):  # more than the queue holds
            with tracing.span("lost"):
                pass
        began = time.monotonic()
        tracing.stop()
        assert time.monotonic() - began < 0.9
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1 and "spans may be lost" in warned[0].message and "password" not in warned[0].message


def test_a_collector_that_comes_back_gets_spans_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(monkeypatch)
    port = free_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with tracing.span("lost"):
        pass
    tracing.flush()
    with collector(port) as found:
        deadline = time.monotonic() + 30
        while not found.named("kept") and time.monotonic() < deadline:
            with tracing.span("kept"):
                time.sleep(0.05)
        assert found.named("kept") and not found.named("lost") and len(caplog.records) == 1
        tracing.stop()
