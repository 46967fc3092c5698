"""With overlap, an iteration is sampled by the policy that is live while the one before it trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World, run_world
from pinning import commit, decide, make_base, pin, sample

import ops.inputs
from assets.naming import key_of
from contracts.store import open_store
from ops.inputs import find_inputs, resolve_start
from ops.off_policy import staleness, trainings_between
from ops.rollback import plan_rollback, roll_back
from ops.state import Start
from resources.errors import ExperimentError, IterationRefused
from resources.experiment import Experiment, load_experiment
from resources.refs import read_artifact, require_ref, write_ref
from resources.registry import Registry
from triplane_dagster.cli.history import json_of, summaries
from triplane_dagster.jobs import HALF_TAG
from triplane_dagster.run import open_runner
from triplane_dagster.sequence import run_iterations

TINY = Path(__file__).parent / "tiny.yaml"


@pytest.fixture(scope="module")
def overlapped() -> Experiment:
    return load_experiment(TINY, ["off_policy.overlap=true"])


@pytest.fixture(scope="module")
def ran_ahead(overlapped: Experiment, base_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from run_world(overlapped, 3, tmp_path_factory.mktemp("ahead"), base_world)


@pytest.mark.slow
def test_each_iteration_but_the_first_is_sampled_one_training_before_its_start(ran_ahead: World) -> None:
    assert ran_ahead.made == ["0000", "0001", "0002"]
    history = Registry(ran_ahead.store, ran_ahead.experiment.name).history()
    assert [each.iteration for each in history] == ran_ahead.made
    policies = [history[0].parent, *(each.policy.digest for each in history)]
    inputs = [find_inputs(ran_ahead.store, ran_ahead.experiment, each) for each in ran_ahead.made]
    acting = [each.policy.digest for each in inputs if each]
    started = [each.start.checkpoint.digest for each in inputs if each and each.start]
    assert started == policies[:3]  # what was trained is a line, as without overlap
    assert acting == [policies[0], policies[0], policies[1]]
    ages = [staleness(ran_ahead.store, each.policy, each.start.checkpoint) for each in inputs if each and each.start]
    assert ages == [0, 1, 1]
    rows = [json_of(each) for each in summaries(ran_ahead.store, ran_ahead.experiment.name)]
    assert [row["parent"] for row in rows] == policies[:3]
    assert all(row["pass_rates"]["gate"]["parent"] for row in rows)


@pytest.mark.slow
def test_the_policy_that_sampled_is_in_the_tokens_in_the_lineage_and_on_the_page(ran_ahead: World) -> None:
    for iteration, age in zip(ran_ahead.made, (0, 1, 1), strict=True):
        rollouts = read_artifact(ran_ahead.store, "tiny", "rollouts", iteration)
        checkpoint = read_artifact(ran_ahead.store, "tiny", "checkpoint", iteration)
        assert rollouts is not None and checkpoint is not None
        acting = rollouts.manifest.parents["policy"].digest
        spans = rollouts.table("sequences.parquet", ["policy_spans"])["policy_spans"].to_pylist()
        assert {span["version"] for row in spans for span in row} == {acting}
        assert (checkpoint.manifest.parents["checkpoint"].digest == acting) == (age == 0)
        (event,) = ran_ahead.instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=key_of(ran_ahead.experiment, "checkpoint"), asset_partitions=[iteration]),
            limit=1,
        ).records
        made = event.asset_materialization
        assert made is not None and made.metadata["staleness"].value == age


@pytest.mark.slow
def test_halves_ran_side_by_side(ran_ahead: World) -> None:
    runs = {
        (run.dagster_run.tags[HALF_TAG], run.dagster_run.tags["dagster/partition"]): run
        for run in ran_ahead.instance.get_run_records()
        if HALF_TAG in run.dagster_run.tags
    }
    assert len(runs) == 6
    for before, after in (("0000", "0001"), ("0001", "0002")):
        trained, sampled = runs["learn", before], runs["sample", after]
        assert trained.start_time and trained.end_time and sampled.start_time and sampled.end_time
        assert sampled.start_time < trained.end_time and trained.start_time < sampled.end_time


@pytest.mark.slow
def test_a_repeated_command_makes_nothing_again(ran_ahead: World) -> None:
    before = len(list(ran_ahead.store.list("artifacts/")))
    with open_runner(ran_ahead.experiment, ran_ahead.instance) as runner:
        for half in ("sample", "learn"):
            runner.iteration("0002", half=half)
    kinds = {key.split("/")[1] for key in ran_ahead.store.list("artifacts/")}
    assert "training_start" in kinds
    assert len([key for key in ran_ahead.store.list("artifacts/") if "/ledger/" not in key]) <= before
    assert run_iterations(ran_ahead.experiment, 0, ran_ahead.instance) == []


@pytest.mark.slow
def test_an_iteration_is_not_trained_before_the_one_that_it_builds_on(overlapped: Experiment, ran_ahead: World) -> None:
    with open_runner(overlapped, ran_ahead.instance) as runner:
        runner.iteration("0003", half="sample")
        with pytest.raises(IterationRefused, match="'0005' of tiny is ahead of the next iteration"):
            runner.iteration("0005", half="sample")
        runner.iteration("0004", half="sample")
        with pytest.raises(IterationRefused, match=r"0004 was sampled ahead, and 0003 has no decision yet"):
            runner.iteration("0004", half="learn")
        inputs = find_inputs(ran_ahead.store, overlapped, "0004")
        assert inputs is not None and inputs.start is None
        runner.iteration("0003", half="learn")
        roll_back(ran_ahead.store, overlapped, plan_rollback(ran_ahead.store, "tiny", "1"), "a test")
        before = set(ran_ahead.store.list("artifacts/checkpoint/"))
        with pytest.raises(IterationRefused, match=r"2 trainings away, at most 1 \(off_policy.max_staleness\)"):
            runner.iteration("0004", half="learn")
        assert set(ran_ahead.store.list("artifacts/checkpoint/")) == before
    more = load_experiment(TINY, ["off_policy.overlap=true", "off_policy.max_staleness=2"])
    with open_runner(more, ran_ahead.instance) as runner:
        runner.iteration("0004", half="learn")
    inputs, first = find_inputs(ran_ahead.store, more, "0004"), Registry(ran_ahead.store, "tiny").history()[0]
    assert inputs is not None and inputs.started.checkpoint == first.policy
    assert trainings_between(ran_ahead.store, inputs.policy, first.policy, 9) == 2


def test_an_iteration_that_is_pinned_while_the_one_before_it_is_decided_starts_from_the_live_policy(
    overlapped: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store = open_store()
    make_base(store, overlapped)
    base = require_ref(store, "tiny", "base_policy")
    state, candidate = (commit(store, kind, "c" * 64).ref for kind in ("trainer_state", "checkpoint"))

    def resolve_and_decide(*arguments: Any) -> Start:
        found = resolve_start(*arguments)
        assert Registry(store, "tiny").promote(candidate, state, parent=base.digest, iteration="0000")
        decide(store, overlapped, "0000")
        return found

    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        pin(overlapped, instance, "0000")
        sample(store, overlapped, "0000")
        monkeypatch.setattr(ops.inputs, "resolve_start", resolve_and_decide)
        pin(overlapped, instance, "0001")
    inputs = find_inputs(store, overlapped, "0001")
    assert inputs is not None and inputs.policy == base and inputs.start is None


def test_without_overlap_nothing_is_sampled_ahead(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store = open_store()
    make_base(store, tiny)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        pin(tiny, instance, "0000")
        write_ref(store, "tiny", "dataset", "0000", commit(store, "dataset", "a" * 64).ref)
        with pytest.raises(IterationRefused, match="'0001' of tiny is ahead of the next iteration"):
            pin(tiny, instance, "0001")
    with pytest.raises(ExperimentError, match="max_staleness is 0"):
        load_experiment(TINY, ["off_policy.overlap=true", "off_policy.max_staleness=0"])


_SERVER = "engine={kind: sglang, base_url: http://a:1, unmatched: warn}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([_SERVER], "name other servers in evaluation.engine"),
        (["engine={kind: routed, replicas: [{kind: openai, base_url: http://a/v1}]}"], "name other servers"),
        ([_SERVER, _SERVER.replace("engine=", "evaluation.engine=")], "engine and evaluation.engine share a:1: name"),
        (
            ["engine={kind: vllm, unmatched: warn, idle: sleep}", "evaluation.engine={kind: builtin}"],
            "engine.idle would take away the servers",
        ),
    ],
)
def test_servers_that_sample_are_not_taken_for_evaluations(overrides: list[str], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        load_experiment(TINY, ["off_policy.overlap=true", *overrides])


_VLLM = "kind: vllm, unmatched: warn"
_OPENAI = "kind: openai, base_url"


@pytest.mark.parametrize(
    ("engine", "other", "shared"),
    [
        (f"{_OPENAI}: http://a:1/v1", f"{_OPENAI}: http://A:1/v1/, timeout_s: 9", "a:1"),
        (f"{_OPENAI}: 'http://me:key@a:1/v1?x=1'", f"{_OPENAI}: 'http://you:key@a:1/v1?x=1'", r"http://a:1/v1\?x=1"),
        (f"{_VLLM}, base_url: http://a:1/", f"{_OPENAI}: http://a:1/v1", "a:1"),
        (
            f"{_VLLM}, base_url: [http://a, http://b:1]",
            f"{_VLLM}, base_url: 'http://b:1,http://c,http://a:80'",
            "a:80, b:1",
        ),
        (f"{_VLLM}, base_url: 'dns:a:1'", f"{_VLLM}, base_url: 'http://a:1'", "a:1"),
        (
            "kind: trtllm, unmatched: warn, address: 'a:1'",
            "kind: trtllm, unmatched: warn, address: 'A:1', retries: 1",
            "a:1",
        ),
        (f"kind: routed, replicas: [{{{_OPENAI}: http://a:1/v1}}]", f"{_OPENAI}: http://a:1/v1", "a:1"),
        (_VLLM, f"{_VLLM}, drain_s: 5", "all GPUs of the machine"),
        (f"{_VLLM}, devices: [0, 1]", f"{_VLLM}, devices: [1, 2]", "GPU 1"),
        (f"{_VLLM}, devices: [1]", "kind: trtllm, unmatched: warn", "GPU 1"),
    ],
)
def test_two_engines_at_one_server_are_no_engines_for_overlap(engine: str, other: str, shared: str) -> None:
    overrides = [f"engine={{{engine}}}", f"evaluation.engine={{{other}}}"]
    with pytest.raises(ExperimentError, match=f"engine and evaluation.engine share {shared}: name other servers"):
        load_experiment(TINY, ["off_policy.overlap=true", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine={kind: routed, replicas: [{kind: builtin}]}"],
        [_SERVER, "evaluation.engine={}"],
        [f"engine={{{_OPENAI}: http://a:1/v1}}", f"evaluation.engine={{{_OPENAI}: http://a:2/v1}}"],
        [f"engine={{{_OPENAI}: http://a/one/v1}}", f"evaluation.engine={{{_OPENAI}: http://a/two/v1}}"],
        [f"engine={{{_VLLM}, base_url: http://a:1}}", f"evaluation.engine={{{_VLLM}}}"],
        [
            f"engine={{{_VLLM}, devices: [0]}}",
            "evaluation.engine={kind: trtllm, unmatched: warn, env: {CUDA_VISIBLE_DEVICES: '1'}}",
        ],
    ],
)
def test_an_engine_for_each_half_allows_overlap(overrides: list[str]) -> None:
    assert load_experiment(TINY, ["off_policy.overlap=true", *overrides]).off_policy.overlap
