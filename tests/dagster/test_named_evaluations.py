"""Any policy is measured on any suite: results are found again, resumed, repeated by name, compared, and suspected."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pyarrow.compute as pc
import pytest
import yaml
from typer.testing import CliRunner

from contracts.artifacts import Artifact, list_artifacts, open_artifact
from contracts.failpoints import KILL_VARIABLE
from contracts.store import Store, open_store
from contracts.tasks import Split
from contracts.yaml_text import load_yaml
from inference.rollouts import ledger
from inference.rollouts.ledger import read_ledger
from ops.ledger.recall import recall
from ops.named_evaluations import reading_of
from ops.readings import gate_reading
from resources.evaluation import Evaluation, load_evaluation
from resources.experiment import load_experiment, parse_experiment
from resources.refs import require_ref, write_ref
from tests.ports import free_port
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.app import app
from triplane_dagster.evaluation_job import evaluation_job_name
from triplane_dagster.lineage import trace

TINY = Path(__file__).parent / "tiny.yaml"


@dataclass
class Desk:
    """A store of its own, a folder of experiment files, and the command line."""

    folder: Path
    store: Store

    def run(self, *arguments: str, code: int = 0) -> str:
        """Output of the command in this process, which must end with `code`."""
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TRIPLANE_DEBUG": ""})
        assert done.exit_code == code, done.output
        return done.output if code else done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def process(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """The command in a process of its own."""
        command = [sys.executable, "-m", "triplane_dagster.cli", *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )

    def sampled(self) -> list[tuple[str, str]]:
        """(action key, group) of every turn that was sampled so far."""
        return [(line.key, line.group) for line in read_ledger(self.folder / "ledger")]

    def runs(self) -> list[Artifact]:
        return list(list_artifacts(self.store, "evaluation_run"))


@pytest.fixture
def desk(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk with the tiny experiment after its iterations, evaluations included."""
    return desk_of(untouched, tmp_path, monkeypatch)


def desk_of(store: Path, folder: Path, patch: pytest.MonkeyPatch) -> Desk:
    shutil.copytree(store, folder / "store")
    (folder / "experiments").mkdir()
    shutil.copy(TINY, folder / "experiments")
    for name, value in {
        "TRIPLANE_STORE": str(folder / "store"),
        "TRIPLANE_EXPERIMENTS": str(folder / "experiments"),
        "OMP_NUM_THREADS": "1",
        ledger.VARIABLE: str(folder / "ledger"),
    }.items():
        patch.setenv(name, value)
    patch.setattr(ledger, "_FOLDER", str(folder / "ledger"))
    return Desk(folder, open_store())


def test_evaluation_of_an_iteration_is_found_and_a_second_call_plays_nothing(desk: Desk) -> None:
    before = {run.ref.key for run in desk.runs()}
    held_out = desk.json("evaluate", "tiny/0001")
    assert held_out["key"] in before and not desk.sampled()
    assert (held_out["split"], held_out["samples"], held_out["tasks"]) == ("held_out", 2, 4)

    plan = desk.json("evaluate", "tiny/0001", "--samples", "1", "--dry-run")
    assert (plan["episodes"], plan["state"]) == (4, "0 tasks kept, 4 to play") and not desk.sampled()
    played = desk.json("evaluate", "tiny/0001", "--samples", "1")
    turns = len(desk.sampled())
    assert turns >= 4 and played["key"] == plan["key"] and played["pass_rate"]["n"] == 4
    assert desk.json("evaluate", "tiny/0001", "--samples", "1") == played and len(desk.sampled()) == turns
    assert desk.json("evaluate", "tiny/0001", "--samples", "1", "--dry-run")["state"] == "found"
    assert played["costs"]["engine_tokens"] > 0


@pytest.mark.slow
def test_killed_evaluation_keeps_every_finished_task_and_loses_no_digest(desk: Desk) -> None:
    asked = ("evaluate", "tiny/base", "--split", "train", "--samples", "1", "--set", "rollouts.concurrency=1")
    killed = desk.process(*asked, **{KILL_VARIABLE: "task-committed:3"})
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    plan = desk.json(*asked, "--dry-run")
    assert plan["state"] == "3 tasks kept, 21 to play"
    first, parts = desk.sampled(), desk.store.list(f"artifacts/evaluation_run/{plan['key']}/parts/")
    kept = {key.rsplit("/", 1)[-1] for key in parts}
    done = desk.json(*asked)
    again = {group for _, group in desk.sampled()[len(first) :]}
    assert len(kept) == 3 and len(again) == 21 and not again & kept
    assert done["pass_rate"]["n"] == done["tasks"] == 24

    shutil.rmtree(desk.folder / "store" / "artifacts" / "evaluation_run" / done["key"])
    assert desk.json(*asked)["evaluation"] == done["evaluation"], "an undisturbed evaluation gives the same"


@pytest.mark.slow
def test_interrupted_evaluation_says_how_to_go_on_and_goes_on(desk: Desk) -> None:
    asked = ("evaluate", "tiny/base", "--split", "train", "--samples", "16", "--set", "rollouts.concurrency=1")
    interrupted = desk.process(*asked)
    while len({group for _, group in desk.sampled()}) < 3:
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.01)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130
    assert f"committed work is kept, continue with `triplane {' '.join(asked)}`" in said
    state = desk.json(*asked, "--dry-run")["state"]
    assert 1 <= int(state.split()[0]) < 24, state


@pytest.mark.slow
def test_named_evaluation_repeats_its_settings_after_the_experiment_has_changed(desk: Desk) -> None:
    base = desk.json("evaluate", "tiny/base", "--split", "gate", "--samples", "2", "--save", "gate2")
    file = desk.folder / "experiments" / "tiny.yaml"
    changed = yaml.safe_load(file.read_text())
    changed["rollouts"]["max_turns"], changed["seed"] = 1, 99
    file.write_text(yaml.safe_dump(changed))
    assert desk.json("evaluate", "tiny/base", "--name", "gate2")["key"] == base["key"]
    later = desk.json("evaluate", "tiny/0001", "--name", "gate2")
    other = desk.json("evaluate", "tiny/0001", "--split", "gate", "--samples", "2")
    assert later["names"] == ["gate2"] and other["names"] == [] and other["key"] != later["key"]

    (name,) = desk.json("evaluations", "names")
    assert (name["name"], name["split"], name["samples"]) == ("gate2", "gate", 2)
    listed = desk.json("evaluations", "list", "--name", "gate2")
    assert [row["key"] for row in listed] == [later["key"], base["key"]]
    write_ref(desk.store, "quickstart", "base_policy", None, require_ref(desk.store, "tiny", "base_policy"))
    for policy in ("tiny/base", "base", "live"):
        (row,) = desk.json("evaluations", "list", "--name", "gate2", "--policy", policy)
        assert row["key"] == base["key"]
    first, second = desk.json("evaluations", "compare", base["evaluation"], later["evaluation"][:12])
    assert first["difference"] is None and second["difference"]["n"] == 4
    rates = [row["pass_rate"]["rate"] for row in (first, second)]
    assert second["difference"]["mean"] == pytest.approx(rates[1] - rates[0])
    assert "gate2" in desk.run("evaluations", "list", "--name", "gate2")
    assert "differ in rollouts.max_turns: 2, 1" in desk_errors("evaluations", "compare", base["key"], other["key"])


def desk_errors(*arguments: str) -> str:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}).stderr


@pytest.mark.slow
def test_tasks_that_a_policy_was_trained_on_are_named(desk: Desk) -> None:
    trained = set()
    for dataset in list_artifacts(desk.store, "dataset"):
        kept = dataset.table("members.parquet").filter(pc.field("kept"))["episode_id"]
        episodes = open_artifact(desk.store, dataset.manifest.parents["rollouts"]).table("episodes.parquet")
        trained |= set(episodes.filter(pc.is_in(episodes["episode_id"], kept))["task_id"].to_pylist())
    assert 0 < len(trained) < 24
    row = desk.json("evaluate", "tiny/0001", "--split", "train", "--samples", "1")
    assert row["trained_on"] == sorted(trained) and row["trained_on_split"] and not row["imported"]
    said = desk.run("evaluate", "tiny/0001", "--split", "train", "--samples", "1")
    assert "train is the split that training draws its tasks from" in said
    assert f"contaminated: policy {row['policy'][:12]} was trained on {len(trained)} of these 24 tasks" in said
    for clean in (("tiny/base", "train"), ("tiny/0001", "held_out")):
        assert desk.json("evaluate", clean[0], "--split", clean[1], "--samples", "1")["trained_on"] == []


def test_settings_are_those_of_the_experiment_and_never_of_a_file_that_is_called_like_it(desk: Desk) -> None:
    plan = desk.json("evaluate", "tiny/0001", "--dry-run")
    file = desk.folder / "experiments" / "tiny.yaml"
    text = file.read_text()
    file.write_text(text.replace("name: tiny\n", "name: renamed\n").replace("max_turns: 2", "max_turns: 1"))
    assert "restore its name, or write renamed" in desk.run("evaluate", "tiny/0001", "--dry-run", code=1)
    file.with_name("elsewhere.yaml").write_text(text)
    assert desk.json("evaluate", "tiny/0001", "--dry-run") == plan


@pytest.mark.parametrize("spaced", [True, False])
def test_policy_of_an_imported_model_is_measured_in_the_layout_of_its_iterations(spaced: bool) -> None:
    values = load_yaml(TINY.read_text())
    sft = {**values["base"], "start": {"path": "/models/tiny", "spaced": spaced}}
    sft.pop("model")
    experiment = parse_experiment({**values, "base": sft})
    evaluation = Evaluation.of(experiment, "gate", "0" * 64, Split.GATE, None, greedy=False)
    for template in (True, False):
        settings = evaluation.settings(spaced=template, imported=True)
        assert reading_of(evaluation).slice(settings) == gate_reading(experiment).slice(experiment)


@pytest.mark.slow
def test_results_are_found_by_lineage_and_recall(desk: Desk) -> None:
    row = desk.json("evaluate", "tiny/base", "--split", "train", "--samples", "1")
    found = trace(desk.store, row["evaluation"])
    assert {step.edge.role for step in found.ancestors if step.distance == 1} == {"policy", "task_suite"}
    (run,) = [run for run in desk.runs() if run.ref.key == row["key"]]
    task = run.table("episodes.parquet", ["task_id"])["task_id"].to_pylist()[0]
    assert row["evaluation"] in {seen["digest"] for seen in recall(desk.store, "task", task).seen}


@pytest.mark.slow
def test_hugging_face_folder_is_imported_and_measured(desk: Desk) -> None:
    base = require_ref(desk.store, "tiny", "base_policy")
    folder = desk.folder / "model"
    (checkpoint,) = [each for each in list_artifacts(desk.store, "checkpoint") if each.ref == base]
    shutil.copytree(checkpoint.directory(), folder)
    imported = desk.json("evaluate", str(folder), "-e", "tiny", "--samples", "1")
    own = desk.json("evaluate", "tiny/base", "--samples", "1")
    assert imported["imported"] and not own["imported"] and imported["key"] != own["key"]
    assert imported["policy"] == own["policy"] and imported["pass_rate"] == own["pass_rate"]
    assert "trained elsewhere" in desk.run("evaluate", str(folder), "-e", "tiny", "--samples", "1")


@pytest.fixture
def served(untouched: Path) -> Iterator[tuple[str, Path]]:
    """URL of `triplane serve` with the base policy of another store, and the folder of that policy."""
    store = str(untouched)
    policy = require_ref(open_store(store), "tiny", "base_policy")
    (checkpoint,) = [each for each in list_artifacts(open_store(store), "checkpoint") if each.ref == policy]
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "triplane_dagster.cli", "serve", "--policy", policy.digest, "--listen", address]
    server = subprocess.Popen(command, env={**os.environ, "TRIPLANE_STORE": store, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not is_ready(f"http://{address}/ready"):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield f"http://{address}/v1", checkpoint.directory()
    finally:
        server.kill()
        server.wait(10)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_policy_at_an_endpoint_is_measured_as_in_its_own_store(desk: Desk, served: tuple[str, Path]) -> None:
    url, folder = served
    here = desk.json("evaluate", "tiny/base", "--split", "gate", "--samples", "3", "--save", "gate3")
    assert desk.json("evaluate", url, "--name", "gate3")["key"] == here["key"], "the store has this policy"
    for kind in ("checkpoint", "trainer_state", "evaluation_run"):
        shutil.rmtree(desk.folder / "store" / "artifacts" / kind)
    assert "name the folder of its tokenizer with --tokenizer" in desk.run("evaluate", url, "--name", "gate3", code=1)
    there = desk.json("evaluate", url, "--tokenizer", str(folder), "--name", "gate3")
    assert there["policy_kind"] == "outside_policy" and there["names"] == ["gate3"]
    assert there["pass_rate"] == here["pass_rate"] and there["costs"]["engine_tokens"] == here["costs"]["engine_tokens"]
    first = desk.json("episodes", "list", "--artifact", there["evaluation"])[0]["episode"]
    shown = desk.json("episodes", "show", first)
    assert shown["policy"] == there["policy"] and shown["messages"][0][0]["role"] == "task"
    exported = desk.run("episodes", "export", "--artifact", there["evaluation"]).splitlines()
    assert shown["messages"] in [json.loads(line)["messages"] for line in exported]
    turns = len(desk.sampled())
    assert desk.json("evaluate", url, "--tokenizer", str(folder), "--name", "gate3") == there
    assert len(desk.sampled()) == turns

    other = desk.folder / "other"
    shutil.copytree(folder, other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    said = desk.run("evaluate", url, "--tokenizer", str(other), "--name", "gate3", code=1)
    assert f"the tokenizer in {other} is not that of" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere/0000", "-e", "tiny"], "has no experiment 'nowhere'; choose one of tiny"),
        (["tiny/0009"], "has no tiny/checkpoint[0009]"),
        (["tiny/first"], "write tiny/live, tiny/base or an iteration such as tiny/0003"),
        (["00000000", "-e", "tiny"], "policy '00000000' matches no checkpoint"),
        (["tiny/base", "--suite", "00000000"], "'00000000' matches 0 task suites"),
        (["tiny/base", "--name", "none"], "choose one of (none), or make it with `triplane evaluate POLICY --save"),
        (["tiny/base", "--name", "none", "--samples", "2"], "leave out --suite, --split, --experiment and the like"),
        (["tiny/base", "--model", "other"], "--tokenizer and --model are for the URL of a server"),
        (["tiny/base", "--save", "Bad"], "name = 'Bad'"),
        (["tiny/base", "--set", "rollouts.max_tokens=8", "--set", "rollouts.max_turn_tokens=4"], "--set rollouts.max"),
        (["./nothing", "-e", "tiny"], "nothing"),
        (["./nothing", "-e", "tiny", "--dry-run"], "--dry-run writes nothing, and ./nothing is yet to be put into"),
        (["http://127.0.0.1:9/v1", "-e", "tiny"], "http://127.0.0.1:9/v1/models can't be reached"),
    ],
)
def test_wrong_input_ends_in_one_line_before_anything_is_played(desk: Desk, arguments: list[str], said: str) -> None:
    printed = desk.run("evaluate", *arguments, code=1)
    assert said in printed and "Traceback" not in printed and len(printed.strip().splitlines()) == 1
    assert not desk.sampled()


def test_split_without_tasks_and_files_that_can_not_be_used_are_named(desk: Desk) -> None:
    row = desk.json("evaluate", "tiny/base", "--samples", "1", "--save", "one")
    folder = desk.folder / "experiments" / "evaluations"
    values = yaml.safe_load((folder / "one.yaml").read_text())
    (folder / "typo.yaml").write_text(yaml.safe_dump(values | {"name": "typo", "sample": 3}))
    assert "sample is not a field: did you mean samples?" in desk.run("evaluate", "tiny/base", "--name", "typo", code=1)
    assert "did you mean samples?" in desk_errors("evaluations", "names")
    (folder / "moved.yaml").write_text((folder / "one.yaml").read_text())
    assert "is called one inside" in desk.run("evaluate", "tiny/base", "--name", "moved", code=1)
    said = desk.run("evaluate", "tiny/base", "--samples", "2", "--save", "one", code=1)
    assert "exists and says something else" in said
    gate = desk.json("evaluate", "tiny/base", "--split", "gate", "--samples", "1")
    said = desk.run("evaluations", "compare", row["key"], gate["key"], code=1)
    assert "compare runs of the same tasks" in said


def test_documented_evaluation_file_is_read(desk: Desk) -> None:
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = desk.folder / "unseen4.yaml"
    file.write_text(block)
    assert set(load_yaml(block)) == set(Evaluation.model_fields)
    assert load_evaluation(file).samples == 4


def test_job_evaluates_a_policy_under_a_named_evaluation_and_shows_the_result(desk: Desk) -> None:
    row = desk.json("evaluate", "tiny/base", "--split", "gate", "--samples", "2", "--save", "gate2")
    config = {"ops": {"tiny_evaluate_policy": {"config": {"policy": "tiny/0001", "evaluation": "gate2"}}}}
    experiment = load_experiment(TINY)
    job = definitions_for([experiment]).resolve_job_def(evaluation_job_name(experiment))
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(run_config=config, instance=instance)
    (event,) = [each for each in done.all_events if each.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION]
    made = event.step_materialization_data.materialization
    listed = desk.json("evaluations", "list", "--name", "gate2")
    assert made.asset_key == dg.AssetKey(["evaluations", "gate2"])
    assert {each["policy"] for each in listed} == {row["policy"], made.metadata["policy"].value}
    assert made.metadata["pass_rate"].value == listed[0]["pass_rate"]["rate"]
