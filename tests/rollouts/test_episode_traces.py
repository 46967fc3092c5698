"""Episodes leave one tree of spans, from their group to the calls at envd, and are the same with and without them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rollouts_script import ScriptedEngine, make_plan, make_tasks, read_then_maybe_fix

from contracts import tracing
from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import read_episodes
from contracts.store import LocalStore
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.rollouts.merge import merge_groups
from inference.rollouts.worker import run_shard
from tests.otlp import Collector, collecting, forget
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
TASKS = make_tasks(40)
PLAN = make_plan(TASKS, 2, group_size=2, oversample=1, keep="index")
ENVD = "triplane.envd.v1."


def rollouts(store: Path, tokenizer: ChatTokenizer) -> Artifact:
    """The plan's rollouts, sampled and graded through an envd server of this environment."""

    async def run(address: str) -> None:
        store_of = LocalStore(store)
        async with SandboxClient(address) as client:
            with tracing.span("step"):
                await run_shard(
                    PLAN,
                    0,
                    engine=ScriptedEngine(tokenizer, read_then_maybe_fix),
                    sandboxes=client,
                    tokenizer=tokenizer,
                    tasks=TASKS,
                    store=store_of,
                    grader=Verifier(client, store_of),
                )

    with LocalEnvd() as server:
        asyncio.run(run(server.address))
    tracing.flush()
    return merge_groups(PLAN, LocalStore(store))


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory, tokenizer: ChatTokenizer) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        return rollouts(tmp_path_factory.mktemp("untraced"), tokenizer)


def test_a_trace_leads_from_a_step_to_each_call_at_envd(
    tmp_path: Path, tokenizer: ChatTokenizer, untraced: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as found:
        made = rollouts(tmp_path, tokenizer)
        assert made.ref == untraced.ref
        episodes = read_episodes(made.table("episodes.parquet"), made.table("sequences.parquet"))
        assert not found.orphans() and len({span.trace_id for span in found.spans}) == 1
        above = ["step", "group", "episode"]
        names = found.names()
        assert names["group"] == 2 and names["episode"] == len(episodes) == 6
        assert names["turn"] == names["text_completion"] == sum(episode.turns for episode in episodes)
        for name, where in {
            "group": above[:2],
            "episode": above,
            "turn": [*above, "turn"],
            "text_completion": [*above, "turn", "text_completion"],
            "grade": ["step", "group", "grade"],
        }.items():
            assert all(found.path(span) == where for span in found.named(name)), name
        called = {f"{ENVD}{name}": [] for name in ("Tools/Batch", "Sandboxes/Create", "Sandboxes/Delete")}
        for name, sides in called.items():
            for span in found.named(name):
                sides.append((found.services[span.span_id], *found.path(span)))
        turn, batch, create = [*above, "turn"], f"{ENVD}Tools/Batch", f"{ENVD}Sandboxes/Create"
        assert set(called[batch]) == {("triplane", *turn, batch), ("envd", *turn, batch, batch)}
        assert set(called[create]) == {("triplane", *turn, create), ("envd", *turn, create, create)}
        assert len(called[batch]) == 2 * 12 and len(called[create]) == 2 * 6
        verify = f"{ENVD}Verifier/Verify"
        assert {tuple(found.path(span)) for span in found.named(verify)} >= {
            ("step", "group", "grade", verify),
            ("step", "group", "grade", verify, verify),
        }
        check_attributes(found, {episode.episode_id for episode in episodes})


def check_attributes(found: Collector, episodes: set[str]) -> None:
    about = [found.attributes(span) for span in found.named("episode")]
    assert {each["triplane.episode"] for each in about} == episodes
    assert {(each["triplane.experiment"], each["triplane.iteration"]) for each in about} == {("test", "0001")}
    assert {each["triplane.group"] for each in about} == {group.group_id for group in PLAN.groups}
    for span in found.named("text_completion"):
        request = found.attributes(span)
        assert request["gen_ai.usage.output_tokens"] > 0 and request["gen_ai.usage.input_tokens"] > 0
        assert request["gen_ai.response.finish_reasons"].values[0].string_value == "stop"
    said = b"".join(span.SerializeToString() for span in found.spans)
    for secret in (b"return", b"Make f of", b"m.py", b"<|im_start|>"):
        assert secret not in said, "spans hold no prompts, files or outputs"


@pytest.mark.slow
def test_without_sampling_nothing_is_sent_and_episodes_are_the_same(
    tmp_path: Path, tokenizer: ChatTokenizer, untraced: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch, OTEL_TRACES_SAMPLER="always_off") as found:
        assert rollouts(tmp_path, tokenizer).ref == untraced.ref
        assert not found.spans


@pytest.mark.slow
def test_a_dead_collector_costs_no_episode(
    tmp_path: Path,
    tokenizer: ChatTokenizer,
    untraced: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert rollouts(tmp_path, tokenizer).ref == untraced.ref
    tracing.stop()
    assert [record.message for record in caplog.records if "spans may be lost" in record.message] != []
    assert len(caplog.records) == 1


@contextmanager
def worker(store: Path, address: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    plan = make_plan(TASKS, 4, group_size=2, concurrency=2, refill=False).model_dump_json()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **tracing.environment(), **variables}
    command = [sys.executable, Path(__file__).parent / "rollouts_worker.py", store, address, plan]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        yield process


@pytest.mark.slow
def test_a_worker_that_continues_a_killed_one_joins_the_same_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(monkeypatch) as found, LocalEnvd() as server:
        with tracing.span("step"):
            killed = {"TRIPLANE_KILL_AT": "group-committed:3", "OTEL_BSP_SCHEDULE_DELAY": "20"}
            with worker(tmp_path, server.address, OTEL_SERVICE_NAME="killed", **killed) as first:
                assert first.wait(60) == -9
            with worker(tmp_path, server.address, OTEL_SERVICE_NAME="again") as second:
                assert second.wait(60) == 0
        tracing.flush()
        assert len({span.trace_id for span in found.spans}) == 1
        of = found.services
        assert "killed" in of.values(), "what had ended was sent"
        again = [span for span in found.spans if of[span.span_id] == "again"]
        assert all(found.parent(span) is not None for span in again)
        assert 1 <= len([span for span in again if span.name == "group"]) < 4, "only what was not committed"
        assert all(found.path(span) == ["step", "group"] for span in again if span.name == "group")
