"""Trainings have spans of their steps, on every rank, within the trace of whoever launched them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from trainer_world import World

from contracts import tracing
from contracts.artifacts import list_artifacts
from tests.otlp import collecting
from trainer.run import run_job

STEPS = ("forward_backward", "optim_step", "export")


def test_steps_of_a_training_have_spans_and_it_gives_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, traced = (world.sft_job(name, max_steps=4) for name in ("plain", "traced"))
    before = run_job(plain)
    with collecting(monkeypatch) as found:
        with tracing.span("train"):
            after = run_job(traced)
        tracing.flush()
        assert before is not None and after is not None
        assert (before.checkpoint.digest, before.trainer_state.digest) == (
            after.checkpoint.digest,
            after.trainer_state.digest,
        )
        assert {name: count for name, count in found.names().items() if name in STEPS} == {
            "forward_backward": 4,
            "optim_step": 4,
            "export": 1,
        }
        assert all(found.path(span) == ["train", span.name] for span in found.spans if span.name in STEPS)
        assert [found.attributes(span)["triplane.step"] for span in found.named("optim_step")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_every_rank_continues_the_trace_of_its_launcher(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.sft_job("ranks", max_steps=3).model_copy(update={"ranks": 2})
    with collecting(monkeypatch) as found:
        with tracing.span("step"):
            environment = {**os.environ, **tracing.environment()}
            command = [sys.executable, "-m", "trainer", "--job", job.model_dump_json()]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        tracing.flush()
        assert not found.orphans() and len({span.trace_id for span in found.spans}) == 1
        assert sorted(found.attributes(span)["triplane.rank"] for span in found.named("train")) == [0, 1]
        assert {name: found.names()[name] for name in STEPS} == {"forward_backward": 6, "optim_step": 6, "export": 2}
        assert {found.services[span.span_id] for span in found.named("train")} == {"trainer"}


@pytest.mark.slow
def test_a_training_that_is_told_to_end_sends_its_spans_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = world.sft_job("ended", max_steps=100_000, evaluate_every=100_000, snapshot_every=5)
    with collecting(monkeypatch, OTEL_BSP_SCHEDULE_DELAY="600000") as found:
        process = subprocess.Popen([sys.executable, "-m", "trainer", "--job", job.model_dump_json()])
        deadline = time.monotonic() + 60
        while not list(list_artifacts(world.store, "trainer_snapshot")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert found.names()["train"] == 1 and found.names()["optim_step"] >= 5 and not found.orphans()
