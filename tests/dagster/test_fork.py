"""Forks train on the episodes of another experiment: by reference, with other settings, never too far off-policy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster_world import World
from typer.testing import CliRunner

from contracts.artifacts import Artifact, ArtifactRef, discard_artifact, list_artifacts, open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import open_store
from curation.dataset import ratings_of
from ops.inputs import find_inputs
from ops.loading import load_tasks
from ops.quarantine.question import reach_of
from ops.report.page import read_data
from resources.errors import IterationRefused, LaunchFailed
from resources.experiment import load_experiment
from resources.quarantine import Quarantine
from resources.refs import read_ref, require_ref
from resources.registry import Registry
from tests.curation.judge_server import judge_server, scored
from triplane_dagster.assembly import load_definitions
from triplane_dagster.cli.app import app
from triplane_dagster.fork import plan_fork
from triplane_dagster.lineage import trace
from triplane_dagster.quarantine import rebuild
from triplane_dagster.sequence import run_iterations
from triplane_dagster.settings import changed_steps
from triplane_dagster.staleness import stale_steps

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny.yaml"
STEPS = ("prompts", "rollouts", "rewards", "dataset", "checkpoint", "evaluation")
SAMPLED = ("rollout_plan", "group", "rollouts")


@pytest.fixture
def source(
    ran: World, untouched: Path, blank_dagster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A copy of the store with two iterations of the tiny experiment, its file, and an instance of its own."""
    shutil.copytree(untouched, tmp_path / "store")
    shutil.copytree(blank_dagster, tmp_path / "dagster")
    (tmp_path / "experiments").mkdir()
    shutil.copy(TINY, tmp_path / "experiments")
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", "experiments")
    monkeypatch.chdir(tmp_path)
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield World(ran.experiment, open_store(), instance, ran.made)


def fork(*arguments: str) -> None:
    done = CliRunner().invoke(app, ["fork", *arguments])
    assert done.exit_code == 0, done.output


def refused(*arguments: str) -> str:
    """The error of a fork that must write nothing."""
    before = sorted(Path("experiments").iterdir())
    done = CliRunner().invoke(app, ["fork", *arguments])
    assert done.exit_code != 0 and sorted(Path("experiments").iterdir()) == before
    return " ".join(done.stderr.split())


def run(source: World, name: str, count: int = 1) -> list[str]:
    return run_iterations(load_experiment(f"experiments/{name}.yaml"), count, source.instance)


def made(source: World, experiment: str, asset: str, iteration: str | None = "0000") -> Artifact:
    return open_artifact(source.store, require_ref(source.store, experiment, asset, iteration))


def count(source: World, *kinds: str) -> int:
    return sum(1 for kind in kinds for _ in list_artifacts(source.store, kind))


@pytest.mark.parametrize("iteration", ["0000", "0001"])
def test_fork_without_overrides_is_its_source_and_makes_nothing_twice(source: World, iteration: str) -> None:
    before = count(source, *SAMPLED, "task_suite", "prompts", "rewards", "dataset", "checkpoint", "evaluation_run")
    fork(f"tiny/{iteration}", "--as", "same")
    assert run(source, "same") == ["0000"]
    assert [made(source, "same", step).ref.digest for step in STEPS[:-1]] == [
        made(source, "tiny", step, iteration).ref.digest for step in STEPS[:-1]
    ]
    assert made(source, "same", "task_suite", None).ref == made(source, "tiny", "task_suite", None).ref
    inputs = find_inputs(source.store, source.experiment, iteration)
    assert inputs is not None and made(source, "same", "base_policy", None).ref == inputs.start.checkpoint
    after = count(source, *SAMPLED, "task_suite", "prompts", "rewards", "dataset", "checkpoint", "evaluation_run")
    assert after == before
    for asset, label in (
        ("iteration_inputs", "forked from"),
        ("base_policy", "forked from"),
        ("rollouts", "sampled by"),
    ):
        event = source.instance.get_latest_materialization_event(dg.AssetKey(["same", asset]))
        assert event is not None and event.asset_materialization is not None
        assert event.asset_materialization.metadata[label].value == f"tiny/{iteration}"
    forked = load_experiment("experiments/same.yaml")
    assert changed_steps(source.store, forked, ["0000"]) == [] and stale_steps(source.store, "same") == []


def test_fork_with_another_loss_and_reward_trains_on_the_same_episodes(source: World) -> None:
    before = count(source, *SAMPLED)
    fork("tiny/0001", "--as", "exp2", "--set", "trainer.algorithm.kind=dapo")
    longer = "[{kind: length, name: length, weight: -1.0, budget: 48, cushion: 48}]"
    fork("tiny/0001", "--as", "exp3", "--set", f"rewards.components={longer}")
    for name in ("exp2", "exp3"):
        run(source, name)
    same, other = (
        {step for step in STEPS if made(source, name, step).ref == made(source, "tiny", step, "0001").ref}
        for name in ("exp2", "exp3")
    )
    assert same == {"prompts", "rollouts", "rewards", "dataset"} and other == {"prompts", "rollouts"}
    assert count(source, *SAMPLED) == before
    live = Registry(source.store, "exp2").live()
    assert live is not None and live.policy == made(source, "exp2", "checkpoint").ref
    assert Registry(source.store, "tiny").history()[-1].policy == made(source, "tiny", "checkpoint", "0001").ref


def test_replay_of_two_iterations_then_the_fork_samples_and_lineage_shows_the_branch(source: World) -> None:
    fork("tiny/0000", "--as", "exp2", "--replay", "2", "--set", "off_policy.max_staleness=2", "--set", "seed=3",
         "--set", "trainer.algorithm.kind=dapo")  # fmt: skip
    before = count(source, *SAMPLED)
    assert run(source, "exp2", 2) == ["0000", "0001"] and count(source, *SAMPLED) == before
    forked = load_experiment("experiments/exp2.yaml")
    second, theirs = (find_inputs(source.store, each, "0001") for each in (forked, source.experiment))
    assert second is not None and theirs is not None
    assert second.policy == theirs.policy and second.start.checkpoint == made(source, "exp2", "checkpoint").ref
    records = made(source, "exp2", "checkpoint", "0001").path("metrics.jsonl").read_text().splitlines()
    assert 0.2 < json.loads(records[0])["effective_sample_size"] < 1
    run(source, "exp2", 1)
    third = find_inputs(source.store, forked, "0002")
    assert third is not None and third.replayed is None
    assert third.policy == made(source, "exp2", "checkpoint", "0001").ref
    assert third.cursor == made(source, "tiny", "prompts", "0001").meta["cursor_after"]
    assert count(source, *SAMPLED) > before

    pinned = made(source, "exp2", "iteration_inputs", "0001")
    assert pinned.meta["forked_from"] == "tiny/0001"
    origin = made(source, "tiny", "iteration_inputs", "0001").ref
    assert origin.uri in {step.node.ref.uri for step in trace(source.store, pinned.ref.digest).ancestors}
    assert pinned.ref.uri in {step.node.ref.uri for step in trace(source.store, origin.digest).descendants}


def test_stale_episodes_are_refused_with_the_number_before_anything_is_made(source: World) -> None:
    said = refused("tiny/0000", "--as", "exp2", "--replay", "2")
    assert "2 trainings" in said and "at most 1" in said and "--set off_policy.max_staleness=2" in said
    fork("tiny/0000", "--as", "exp2", "--set", "trainer.algorithm.kind=dapo")
    path = Path("experiments/exp2.yaml")
    path.write_text(path.read_text().replace("replay: 1", "replay: 2"))
    with pytest.raises(IterationRefused, match="2 trainings away, at most 1"):
        run(source, "exp2", 2)
    assert find_inputs(source.store, load_experiment(path), "0001") is None


def test_small_effective_sample_size_is_refused_before_the_first_optimizer_step(source: World) -> None:
    bounds = ("--set", "off_policy.max_staleness=2", "--set", "off_policy.min_effective_sample_size=0.999")
    fork("tiny/0000", "--as", "exp2", "--replay", "2", *bounds, "--set", "trainer.algorithm.kind=dapo")
    with pytest.raises(LaunchFailed, match=r"effective sample size .* is 0\.9\d\d of their tokens, at least 0.999"):
        run(source, "exp2", 2)
    assert read_ref(source.store, "exp2", "checkpoint", "0000") is not None  # on-policy
    assert read_ref(source.store, "exp2", "checkpoint", "0001") is None and not count(source, "snapshot")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rollouts.group_size=8", "rollouts.group_size is 8 in e, but tiny/0001 was sampled with 4"),
        ("prompts.groups=8", "prompts.groups is 8"),
        ("prompts.workers=1", "prompts.workers is 1"),
        ("engine.kind=vllm", "engine.kind is 'vllm'"),
        ("sandboxes.limits.pids=8", "sandboxes.limits.pids is 8"),
        ("seed=4", "seed is 4"),
        ("tasks.train=25", "tasks.train is 25 in e and 24 in tiny"),
        ("base.sft.max_steps=7", "base.sft.max_steps is 7"),
        ("trainer.precision.kind=bf16", "trainer.precision.kind is 'bf16'"),
        ("name=other", "override name"),
        ("fork.replay=2", "override fork"),
        ("trainer.nope=1", "trainer.nope is not a field"),
        ("nonsense", "not field=value"),
    ],
)
def test_overrides_of_what_was_sampled_and_invalid_ones_are_refused(source: World, override: str, named: str) -> None:
    assert named in refused("tiny/0001", "--as", "e", "--set", override)


def test_unknown_sources_and_taken_or_odd_names_are_refused(source: World) -> None:
    assert "no tiny/iteration_inputs[0007]" in refused("tiny/0007", "--as", "e")
    assert "names no iteration" in refused("tiny/7", "--as", "e")
    assert "names no iteration" in refused("tiny", "--as", "e")
    assert "no experiment 'nope'" in refused("nope/0000", "--as", "e")
    assert "exists in experiments/tiny.yaml" in refused("tiny/0000", "--as", "tiny")
    for name in ("../e", "E 2", "", "e\n"):
        assert "name = " in refused("tiny/0000", "--as", name)
    fork("tiny/0000", "--as", "e", "--dry-run")
    assert not Path("experiments/e.yaml").exists()
    fork("tiny/0000", "--as", "e")
    run(source, "e")
    Path("experiments/e.yaml").unlink()  # the results are still there
    assert f"exists in {source.store.url}" in refused("tiny/0000", "--as", "e")


def test_settings_that_sampled_count_and_not_those_that_the_file_has_now(source: World) -> None:
    path = Path("experiments/tiny.yaml")
    changed = path.read_text().replace("group_size: 4", "group_size: 8")
    path.write_text(changed + "deployment: {servers: ['http://127.0.0.1:9/v1']}\nschedule: {iterations: 4}\n")
    assert "set rollouts.group_size to 4" in refused("tiny/0000", "--as", "e")
    fork("tiny/0000", "--as", "e", "--set", "rollouts.group_size=4")
    forked = load_experiment("experiments/e.yaml")
    assert forked.deployment.servers == ()  # they keep serving the source's policy
    assert forked.schedule is None, "no night of a fork is overdue"
    assert run(source, "e") == ["0000"]


def test_a_fork_that_uses_an_engine_of_its_source_says_so(source: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("experiments/tiny.yaml")
    values, server = path.read_text(), "{kind: vllm, base_url: 'http://gpu:8000'}"
    path.write_text(values.replace("evaluation: {", f"evaluation: {{engine: {server}, "))
    said = CliRunner().invoke(app, ["fork", "tiny/0000", "--as", "e", "--dry-run"]).stdout
    assert "its engines and those of its source share gpu:8000, where one policy is served at a time" in said
    path.write_text(f"{values}engine: {{kind: vllm, base_url: 'http://gpu:8000,http://gpu:8001'}}\n")
    monkeypatch.setattr("triplane_dagster.fork.preview", lambda *_: None)  # its source was sampled by another engine

    def shared(*overrides: str) -> list[str]:
        return plan_fork(source.store, path, "0000", "e", list(overrides), 1).shared

    assert shared() == ["gpu:8000", "gpu:8001"]
    assert shared("engine.base_url=http://gpu:8001/") == ["gpu:8001"]
    assert shared(f"engine={{kind: routed, replicas: [{server}]}}") == ["gpu:8000"]
    assert shared("engine.base_url=http://other:8000") == []
    assert shared("engine.base_url=http://other:8000", f"evaluation.engine={server}") == ["gpu:8000"]


def test_deleted_or_missing_rollouts_are_never_sampled_anew(source: World) -> None:
    fork("tiny/0000", "--as", "early")
    for artifact in list(list_artifacts(source.store, "rollouts")):
        discard_artifact(source.store, artifact.ref)
    before = count(source, *SAMPLED)
    assert "store" in refused("tiny/0000", "--as", "late")
    with pytest.raises(ArtifactMissing, match="rollouts"):
        run(source, "early")
    assert count(source, *SAMPLED) == before
    assert read_ref(source.store, "early", "iteration_inputs", "0000") is None


def test_fork_of_a_fork_keeps_the_first_sources_episodes(source: World) -> None:
    fork("tiny/0001", "--as", "exp2", "--set", "trainer.algorithm.kind=dapo")
    run(source, "exp2")
    fork("exp2/0000", "--as", "exp3", "--set", "trainer.algorithm.clip_high=0.4")
    run(source, "exp3")
    assert made(source, "exp3", "rollouts").ref == made(source, "tiny", "rollouts", "0001").ref
    pinned = made(source, "exp3", "iteration_inputs")
    assert (pinned.meta["forked_from"], pinned.meta["sampled_by"]) == ("exp2/0000", "tiny/0001")
    done = CliRunner().invoke(app, ["compare", "tiny", "exp2", "exp3", "--json", "--output", "page.html"])
    rows = json.loads(done.stdout)
    (row,) = (each for each in rows if each["experiments"]["exp3"] and each["greedy"] and each["split"] == "held_out")
    assert [each["iteration"] for each in row["experiments"].values()] == ["0001", "0000", "0000"]
    assert row["differences"]["exp3"]["n"] == 4
    assert Path("page.html").read_text().count("<img") == 4


def test_quarantined_episodes_leave_the_datasets_of_forks_too(source: World) -> None:
    fork("tiny/0000", "--as", "other", "--set", "trainer.learning_rate=0.001")
    run(source, "other")
    rollouts = made(source, "tiny", "rollouts")
    task = rollouts.table("episodes.parquet")["task_id"][0].as_py()
    found, marked = reach_of(source.store, "task", task)
    assert {("tiny", "0000"), ("other", "0000")} <= set(found.iterations)
    Quarantine(source.store).mark("task", task, marked, "a test")
    names = {name: load_experiment(f"experiments/{name}.yaml") for name in ("tiny", "other")}
    done = rebuild(source.store, found.iterations, names.__getitem__, source.instance)
    assert done.faults == [] and {each.experiment for each in done.done} == {"tiny", "other"}
    for name in names:
        members = made(source, name, "dataset").table("members.parquet", ["episode_id", "reason"]).to_pylist()
        assert {row["reason"] == "quarantined" for row in members} == {True, False}


def test_fork_with_rules_over_judgements_reaches_key_report_quarantine_and_the_next_rules(source: World) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        length = len(body["messages"][1]["content"])
        return scored((length + 5 * body["seed"] * (length % 3 == 0)) % 11)

    def rules(within: float) -> list[str]:
        values = {
            "require": [{"component": "review", "at_least": 0.3}],
            "agree": [{"components": ["review"], "within": within}],
            "distinct": {"similarity": 1},
            "caps": [{"by": "family", "max_groups": 1}],
        }
        return [part for name, value in values.items() for part in ("--set", f"dataset.{name}={json.dumps(value)}")]

    with judge_server(reply) as server:
        review = {"kind": "judge", "name": "review", "weight": 0, "samples": 2, "model": "judge-1"}
        length = {"kind": "length", "name": "length", "weight": -0.5, "budget": 48, "cushion": 48}
        components = json.dumps([length, review | {"endpoint": {"url": f"{server.url}/v1"}}])
        for name, within in (("strict", 0.3), ("lax", 1.0)):
            fork("tiny/0000", "--as", name, "--set", f"rewards.components={components}", *rules(within))
        run(source, "strict")
        asked = len(server.asked)
        run(source, "lax")
        assert 0 < asked == len(server.asked)
    rewards, strict, lax = (
        made(source, name, step) for name, step in (("strict", "rewards"), ("strict", "dataset"), ("lax", "dataset"))
    )
    assert made(source, "lax", "rewards").ref == rewards.ref and strict.ref.key != lax.ref.key
    assert set(strict.manifest.parents) == {"rollouts", "rewards", "ratings", "task_suite"}
    rated = {row["episode_id"]: row for row in ratings_of(rewards, {"review"}).to_pylist()}
    suite = load_tasks(source.store, strict.manifest.parents["task_suite"])
    tasks = made(source, "strict", "rollouts").table("episodes.parquet", ["group_id", "task_id"]).to_pylist()
    family_of = {row["group_id"]: suite[row["task_id"]].family for row in tasks}
    for dataset, within in ((strict, 0.3), (lax, 1.0)):
        rows = dataset.table("members.parquet").to_pylist()
        for row in rows:
            told = rated[row["episode_id"]]
            expected = "disagreement" if told["spread"] > within else "unmet" if told["value"] < 0.3 else None
            assert row["reason"] == expected or (expected is None and row["reason"] in ("duplicate", "over_cap"))
            assert (row["reward"] is None) == (expected == "disagreement")
        kept = [family_of[group] for group in {row["group_id"] for row in rows if row["kept"]}]
        assert len(kept) == len(set(kept)) > 0
    reasons = Counter(row["reason"] for row in strict.table("members.parquet").to_pylist())
    assert reasons["disagreement"] and reasons["unmet"] and strict.meta["reasons"]["unmet"] == reasons["unmet"]
    assert '"unmet"' in json.dumps(read_data(made(source, "strict", "report").path("report.html").read_bytes()))
    experiment = load_experiment("experiments/strict.yaml")
    assert changed_steps(source.store, experiment, ["0000"]) == []

    task = tasks[0]["task_id"]
    _, marked = reach_of(source.store, "task", task)
    Quarantine(source.store).mark("task", task, marked, "a test")
    assert rebuild(source.store, [("strict", "0000")], lambda _: experiment, source.instance).faults == []
    rebuilt = made(source, "strict", "dataset")
    assert set(rebuilt.manifest.parents) == {*strict.manifest.parents, "quarantined"}
    assert rebuilt.manifest.parents["ratings"] == strict.manifest.parents["ratings"]
    assert rebuilt.meta["reasons"]["quarantined"] == 4


def test_a_killed_fork_leaves_no_experiment_and_deleting_one_leaves_its_source(source: World) -> None:
    command = [
        sys.executable,
        "-c",
        "from triplane_dagster.cli import main; main()",
        "fork",
        "tiny/0000",
        "--as",
        "exp2",
    ]
    killed = subprocess.run(command, env={**os.environ, "TRIPLANE_KILL_AT": "file-staged"}, check=False, timeout=120)
    assert killed.returncode < 0 and [each.name for each in Path("experiments").glob("*.yaml")] == ["tiny.yaml"]
    fork("tiny/0000", "--as", "exp2")
    assert yaml.safe_load(Path("experiments/exp2.yaml").read_text())["extends"] == "tiny.yaml"
    dg.Definitions.validate_loadable(load_definitions())
    refs = {step: read_ref(source.store, "tiny", step, "0000") for step in STEPS}
    run(source, "exp2")
    Path("experiments/exp2.yaml").unlink()
    dg.Definitions.validate_loadable(load_definitions())
    assert {step: read_ref(source.store, "tiny", step, "0000") for step in STEPS} == refs
    assert all(isinstance(ref, ArtifactRef) for ref in refs.values())
