"""A week of two experiments under the real web server, daemon and code server: five nights of two iterations each, with
kills, a refusal, a failed deployment, a rollback, a new reward rule and a fork. An oracle then reads the store and
computes what registry, ledger, plots and partitions must show.

    night 1  the daemon is killed
    night 2  the process of a run is killed, and a trainer
    night 3  everything is killed at once and started again
    night 4  alpha's candidate is refused; its nights are skipped until somebody asks for iterations
    night 5  a server of alpha could not be reached
    then     alpha: rollback, rewards of old iterations graded by a new rule, fork
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
import yaml

from benchmarks.chaos_findings import account
from contracts.artifacts import Artifact, ArtifactRef, list_artifacts, open_artifact
from inference.rollouts.ledger import VARIABLE as LEDGER_VARIABLE
from inference.rollouts.ledger import read_ledger
from ops.graph import PER_ITERATION
from ops.readings import EVALUATION_RUN
from tests.acceptance.dagster_ui import DagsterUi, Run
from tests.acceptance.laboratory import ROOT, Laboratory, processes_of
from triplane_dagster.dead_runs import PROCESS_TAG
from triplane_dagster.training_job import NIGHT_TAG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
NAMES = ("alpha", "beta")
OF_ALPHA = 11
NIGHTS_OF_ALPHA = [("0000", "0001"), ("0002", "0003"), ("0004", "0005"), ("0006", "0007"), ("0009", "0010")]
REFUSED = "0006"
UNDISTURBED = 6
"""Iterations of alpha before anything but kills disturbs them."""


@dataclass
class Week:
    """What happened, as the operator saw it."""

    lab: Laboratory
    ui: DagsterUi
    skipped: str = ""
    """Why a night was skipped after the refusal."""
    second_request: str = ""
    """Error of a request for iterations while others were under way."""
    killed: list[str] = field(default_factory=list)
    """Runs whose process was killed."""
    kills: list[float] = field(default_factory=list)
    """Times of kills, in seconds since 1970."""
    behind: str = ""
    """Page of the sampler whose server could not be reached."""
    sampled_before_backfill: int = 0
    sampled_after_backfill: int = 0
    runs: list[Run] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes that were left when the UI had ended."""

    @property
    def store(self) -> Path:
        return self.lab.folder / ".triplane" / "store"

    def pointers(self, *path: str) -> list[dict[str, Any]]:
        """Values of a pointer, in order, read from its files."""
        folder = self.store.joinpath("pointers", *path)
        entries = sorted(folder.glob("*.json"), key=lambda each: int(each.stem))
        return [json.loads(each.read_text()) for each in entries]

    def experiments(self) -> list[str]:
        """Names of the experiments, the fork included."""
        return sorted(each.stem for each in self.lab.experiment_file.parent.glob("*.yaml"))

    def nights(self, name: str) -> list[tuple[str, str]]:
        """First and last iteration that each night asked for."""
        asked = [each for each in self.pointers("targets", name) if each["night"]]
        return list(dict.fromkeys((f"{each['first']:04}", f"{each['first'] + each['count'] - 1:04}") for each in asked))

    def iterations(self, name: str) -> list[str]:
        """Iterations with a decision."""
        folder = self.store / "pointers" / "assets" / name / "sampler"
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def artifact(self, name: str, asset: str, iteration: str, which: int = -1) -> Artifact:
        """Artifact that an asset refers to; which: of all that it referred to."""
        ref = ArtifactRef.model_validate(self.pointers("assets", name, asset, iteration)[which])
        return open_artifact(self.lab.store, ref)

    def decisions(self, name: str, which: int = 0) -> dict[str, dict[str, Any]]:
        """Decision about each iteration, the first one made by default."""
        return {
            each: self.artifact(name, "sampler", each, which).json("decision.json") for each in self.iterations(name)
        }

    def sampled(self) -> int:
        """Turns sampled so far."""
        return sum(1 for _ in read_ledger(self.lab.folder / "tokens"))

    # what the operator does

    def edit(self, name: str, **sections: Any) -> None:
        """Change an experiment's file and reload the code location."""
        path = self.lab.experiment_file.parent / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}, sort_keys=False))
        self.ui.reload()

    def wait_for_iterations(self, name: str, count: int) -> None:
        self.ui.wait_until(lambda: len(self.iterations(name)) >= count, f"{count} iterations of {name}", 900)

    def wait_for_the_end(self, *names: str) -> None:
        """Wait until nothing that was asked for is left, and nothing runs."""
        ui = self.ui
        ui.wait_until(lambda: all(self.pointers("targets", name)[-1]["done"] for name in names), "what was asked", 900)
        ui.wait_until(lambda: not ui.runs(statuses=["QUEUED", "STARTING", "STARTED"]), "the end of all runs", 600)

    def wait_for_step(self, name: str, iteration: str) -> Run:
        """Wait until the run of an iteration works; its process is in its tags."""

        def working() -> Run | None:
            for run in self.ui.runs(statuses=["STARTED"], pipelineName=f"{name}_iteration"):
                if run.partition == iteration and run.tags.get(PROCESS_TAG, "").endswith(run.id):
                    return run
            return None

        found: Run = self.ui.wait_until(working, f"a run of {name}/{iteration}", 600)
        return found

    def wait_for_night(self, name: str, first: int) -> None:
        """Wait until a night asked for iterations from this one on."""

        def asked() -> bool:
            targets = self.pointers("targets", name)
            return bool(targets) and targets[-1]["first"] == first and targets[-1]["night"] is not None

        self.ui.wait_until(asked, f"a night of {name} from {first}", 600)

    def train(self, name: str, iterations: int, reason: str) -> str:
        config = {"iterations": iterations, "from_policy": "live", "reason": reason}
        return self.ui.launch(f"{name}_train", {"ops": {f"{name}_request": {"config": config}}})

    def error_of(self, run_id: str) -> str:
        """Text of the error that a run failed with."""
        query = """query ($id: ID!) { logsForRun(runId: $id) { ... on EventConnection { events {
            ... on ExecutionStepFailureEvent { error { message errorChain { error { message } } } } } } } }"""
        events = self.ui.ask(query, id=run_id)["logsForRun"]["events"]
        return " ".join(json.dumps(each["error"]) for each in events if each.get("error"))


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Week]:
    folder = tmp_path_factory.mktemp("week")
    lab = Laboratory(folder, folder / "experiments" / "alpha.yaml", environment={"OMP_NUM_THREADS": "1"})
    lab.environment |= {
        "TRIPLANE_EXPERIMENTS": str(folder / "experiments"),
        "TRIPLANE_STORE": str(folder / ".triplane" / "store"),
        LEDGER_VARIABLE: str(folder / "tokens"),
    }
    shipped = (ROOT / "dagster.yaml").read_text()
    assert "max_concurrent_runs: 1" in shipped
    (folder / "dagster.yaml").write_text(shipped.replace("max_concurrent_runs: 1", "max_concurrent_runs: 2"))
    (folder / "workspace.yaml").write_text((ROOT / "workspace.yaml").read_text())
    (folder / "experiments").mkdir()
    for seed, name in enumerate(NAMES, start=3):
        values = yaml.safe_load(TINY.read_text()) | {
            "name": name,
            "seed": seed,
            "schedule": {"cron": "* * * * *", "iterations": 2, "max_hours": 1},
        }
        if name == "alpha":
            values["promotion"] = {"margin": 0.75, "on_refusal": "stop"}
        (folder / "experiments" / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    week = Week(lab, DagsterUi(lab))
    week.ui.start()
    try:
        live_through(week)
    finally:
        week.ui.stop()
        deadline = time.monotonic() + 60
        while (left := [each for each in processes_of(folder) if "inference serve" not in each]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.5)
        week.left = left
    yield week


def live_through(week: Week) -> None:
    ui = week.ui
    for name in NAMES:
        ui.start_schedule(f"{name}_nightly")

    week.wait_for_step("alpha", "0000")  # night 1
    assert ui.kill_one("triplane_dagster.daemon")
    ui.wait_until(lambda: "daemon ended with code -9; starting it again" in ui.log.read_text(), "another daemon")
    for name in NAMES:
        week.wait_for_iterations(name, 2)

    run = week.wait_for_step("alpha", "0002")  # night 2
    os.kill(int(run.tags[PROCESS_TAG].split("/")[2]), signal.SIGKILL)
    week.killed.append(run.id)
    week.kills.append(time.time())
    ui.wait_until(lambda: ui.kill_one("-m trainer"), "a trainer")
    week.kills.append(time.time())
    for name in NAMES:
        week.wait_for_iterations(name, 4)

    week.wait_for_night("alpha", 4)  # night 3
    ui.stop_schedule("alpha_nightly")
    run = week.wait_for_step("alpha", "0004")
    ui.kill()
    week.killed.append(run.id)
    week.kills.append(time.time())
    ui.start()
    for name in NAMES:
        week.wait_for_iterations(name, 6)

    week.edit("alpha", promotion={"margin": 0.01, "on_refusal": "stop"})  # night 4
    ui.start_schedule("alpha_nightly")
    week.wait_for_iterations("alpha", 7)
    week.skipped = ui.wait_until(
        lambda: next(
            (
                tick["skipReason"]
                for tick in ui.schedule("alpha_nightly")["ticks"]
                if "on_refusal" in (tick["skipReason"] or "")
            ),
            None,
        ),
        "a skipped night",
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    deployment = {"servers": [url], "attempts": 1, "timeout_s": 5}
    week.edit("alpha", promotion={"margin": 0.75, "on_refusal": "stop"}, deployment=deployment)
    ui.wait_for_run(week.train("alpha", 2, "the margin is corrected"), "SUCCESS")
    second = week.train("alpha", 1, "impatient")
    ui.wait_for_run(second, "FAILURE")
    week.second_request = week.error_of(second)

    week.wait_for_night("alpha", 9)  # night 5
    ui.stop_schedule("alpha_nightly")
    ui.wait_until(lambda: len(week.nights("beta")) >= len(NIGHTS_OF_ALPHA), "the nights of beta", 600)
    ui.stop_schedule("beta_nightly")
    week.wait_for_the_end(*NAMES)
    week.behind = sampler_page(week, "0010")
    with Server(week, port):
        ui.wait_until(lambda: settled(ui, ui.backfill("alpha", ["sampler"], ["0010"])), "sampler again")
        served = httpx.get(f"http://127.0.0.1:{port}/version", timeout=30).json()
        assert served["version"] == week.pointers("live", "alpha")[-1]["policy"]["digest"]

        rollback = {"ops": {"alpha_roll_back": {"config": {"to": "", "reason": "worse on Monday"}}}}
        ui.wait_for_run(ui.launch("alpha_rollback", rollback), "SUCCESS")
        served = httpx.get(f"http://127.0.0.1:{port}/version", timeout=30).json()
        assert served["version"] == week.pointers("live", "alpha")[-1]["policy"]["digest"]

    week.sampled_before_backfill = week.sampled()
    shorter = {"kind": "length", "name": "length", "weight": -0.25, "budget": 48, "cushion": 48}
    week.edit("alpha", rewards={"components": [shorter]})
    backfill = ui.backfill("alpha", ["rewards", "reward_flips", "dataset"], ["0001", "0000"])
    ui.wait_until(lambda: settled(ui, backfill), "the backfill", 600)
    week.sampled_after_backfill = week.sampled()

    week.lab.run("fork", "alpha/0001", "--as", "gamma", "--set", "trainer.learning_rate=0.001")
    ui.reload()
    ui.wait_for_run(week.train("gamma", 1, "a smaller step"), "SUCCESS")
    week.wait_for_the_end("gamma")
    week.runs = ui.runs()


class Server:
    """A server of the base policy, as an operator starts it."""

    def __init__(self, week: Week, port: int) -> None:
        base = week.pointers("assets", "alpha", "base_policy", "all")[-1]["digest"]
        self._command = [sys.executable, "-m", "inference", "serve", "--policy", base, "--listen", f"127.0.0.1:{port}"]
        self._week, self._port = week, port

    def __enter__(self) -> None:
        log = (self._week.lab.folder / "server.log").open("wb")
        self._child = subprocess.Popen(
            self._command, cwd=self._week.lab.folder, env=self._week.lab.env, stdout=log, stderr=log
        )

        def up() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        self._week.ui.wait_until(up, "the server")

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait(30)


def settled(ui: DagsterUi, backfill: str) -> bool:
    """Wait for the runs of a backfill. Raises AssertionError if one failed."""
    query = "query ($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill { status } } }"

    def ended() -> str:
        status: str = ui.ask(query, id=backfill)["partitionBackfillOrError"]["status"]
        return status if status.startswith("COMPLETED") or status in ("FAILED", "CANCELED") else ""

    status = ui.wait_until(ended, f"backfill {backfill}", 600)
    assert status == "COMPLETED_SUCCESS", (status, ui.runs()[:4])
    return True


def sampler_page(week: Week, iteration: str) -> str:
    """Metadata of the latest materialization of alpha's sampler, as text."""
    query = """query ($key: AssetKeyInput!, $partition: [String!]) { assetOrError(assetKey: $key) { ... on Asset {
        assetMaterializations(partitions: $partition, limit: 1) { metadataEntries { label
        ... on MarkdownMetadataEntry { mdStr } ... on IntMetadataEntry { intValue } } } } } }"""
    found = week.ui.ask(query, key={"path": ["alpha", "sampler"]}, partition=[iteration])
    return json.dumps(found["assetOrError"]["assetMaterializations"])


def test_every_night_ran_and_each_iteration_once(week: Week) -> None:
    assert week.nights("alpha") == NIGHTS_OF_ALPHA
    assert len(week.iterations("alpha")) == OF_ALPHA
    nights = week.nights("beta")
    assert len(nights) >= len(NIGHTS_OF_ALPHA)
    assert [each for night in nights for each in night] == week.iterations("beta"), "beta was never asked by hand"
    for name in week.experiments():
        assert week.iterations(name) == [f"{number:04}" for number in range(len(week.iterations(name)))]
        assert week.pointers("targets", name)[-1]["done"]
    assert week.skipped == "iteration 0006 is refused and promotion.on_refusal is stop: launch alpha_train by hand"
    assert "iterations 0007 to 0008 are under way (the margin is corrected)" in week.second_request


def test_the_registry_is_what_the_decisions_say(week: Week) -> None:
    for name in week.experiments():
        base = week.pointers("assets", name, "base_policy", "all")[-1]["digest"]
        live, expected = base, []
        for iteration, decision in week.decisions(name).items():
            assert decision["parent"]["digest"] == live, f"{name}/{iteration} continues from what was live"
            assert decision["decision"] == ("refused" if (name, iteration) == ("alpha", REFUSED) else "live")
            if decision["decision"] == "live":
                live = decision["candidate"]["digest"]
                expected.append((iteration, live))
        entries = week.pointers("live", name)
        if name == "alpha":
            restored = expected[-2]
            assert entries.pop()["policy"]["digest"] == restored[1], "the rollback"
        assert [(each["iteration"], each["policy"]["digest"]) for each in entries] == expected
    shown = {each["experiment"]: each for each in week.lab.json("status")}
    for name in week.experiments():
        assert shown[name]["live"]["policy"]["digest"] == week.pointers("live", name)[-1]["policy"]["digest"]


def test_nothing_was_trained_or_sampled_twice(week: Week) -> None:
    store = week.lab.store
    trained = Counter(each.ref.key for each in list_artifacts(store, "checkpoint"))
    made = sum(len(week.iterations(name)) for name in week.experiments())
    assert len(trained) == made + len(NAMES), "one an iteration, and a base policy for each seed"
    commits = {}
    for group in list_artifacts(store, "group"):
        config = group.manifest.config
        commits[config["rollouts"], config["group_id"]] = group.manifest.created_unix
    for evaluated in list_artifacts(store, EVALUATION_RUN):
        commits[evaluated.ref.key, ""] = evaluated.manifest.created_unix
    tokens = account(read_ledger(week.lab.folder / "tokens"), commits, week.kills)
    assert tokens.sampled_after_commit == 0
    assert tokens.lost_at_most < tokens.sampled / 4
    assert week.sampled_before_backfill == week.sampled_after_backfill > 0, "grading samples nothing"


def test_kills_left_no_trace_in_what_was_made(week: Week, tmp_path: Path) -> None:
    """The iterations before the first refusal are those of a run that nobody disturbed."""
    lab = Laboratory(tmp_path, tmp_path / "alpha.yaml", environment={"OMP_NUM_THREADS": "1"})
    values = yaml.safe_load(TINY.read_text()) | {"name": "alpha", "seed": 3}
    lab.experiment_file.write_text(yaml.safe_dump(values | {"promotion": {"margin": 0.75, "on_refusal": "stop"}}))
    lab.iterate(UNDISTURBED)
    for iteration in (f"{number:04}" for number in range(UNDISTURBED)):
        for asset in ("rollouts", "checkpoint", "evaluation"):
            made = week.artifact("alpha", asset, iteration, 0).ref.digest
            assert made == lab.artifact(asset, iteration).ref.digest, f"{asset} of {iteration}"


def test_killed_runs_were_launched_again_by_themselves(week: Week) -> None:
    runs = {run.id: run for run in week.runs}
    for killed in week.killed:
        assert runs[killed].status == "FAILURE"
        again = [run for run in week.runs if run.tags.get("dagster/parent_run_id") == killed]
        assert again and all(run.status == "SUCCESS" for run in again)
    failed = {run.id for run in week.runs if run.status != "SUCCESS"} - set(week.killed)
    for run_id in failed:  # the impatient request, and what else ran when everything was killed
        run = runs[run_id]
        retried = any(other.tags.get("dagster/parent_run_id") == run_id for other in week.runs)
        assert run.job == "alpha_train" or retried, run
    assert week.left == []


def test_runs_of_an_experiment_never_overlapped(week: Week) -> None:
    for name in week.experiments():
        spans = sorted((run.start, run.end) for run in week.runs if run.job == f"{name}_iteration" and run.start)
        assert all(before[1] <= after[0] + 1 for before, after in itertools.pairwise(spans) if before[1])
    nights = [run for run in week.runs if NIGHT_TAG in run.tags]
    assert {run.job for run in nights} >= {"alpha_train", "beta_train"}


def test_partitions_and_plots_show_what_the_store_holds(week: Week) -> None:
    with chdir(week.lab.folder), dg.DagsterInstance.from_config(".") as instance:
        for name in week.experiments():
            assert sorted(instance.get_dynamic_partitions(name)) == week.iterations(name)
            for asset in PER_ITERATION:
                for iteration in week.iterations(name):
                    found = instance.fetch_materializations(
                        dg.AssetRecordsFilter(dg.AssetKey([name, asset]), asset_partitions=[iteration]), limit=1
                    ).records
                    refs = week.pointers("assets", name, asset, iteration)
                    if not refs:
                        assert not found, f"{name}/{asset}[{iteration}]"
                        continue
                    shown = found[0].asset_materialization
                    assert shown is not None
                    assert shown.metadata["digest"].value == refs[-1]["digest"], f"{name}/{asset}[{iteration}]"


def test_the_ledger_recalls_what_brute_force_finds(week: Week) -> None:
    found: dict[str, set[str]] = {}
    for each in list_artifacts(week.lab.store, "rollouts"):
        table = each.table("rollouts.parquet") if "rollouts.parquet" in each.names() else each.table("episodes.parquet")
        for task, episode in zip(table["task_id"].to_pylist(), table["episode_id"].to_pylist(), strict=True):
            found.setdefault(task, set()).add(episode)
    for task in sorted(found)[:5]:
        assert week.lab.json("recall", "--task", task)["episodes"] == len(found[task]), task


def test_a_server_that_was_away_is_shown(week: Week) -> None:
    """That it was brought back, and followed the rollback, was seen meanwhile."""
    assert '"label": "servers behind", "intValue": 1' in week.behind
    assert "remove it from traffic by hand" in week.behind


def test_the_new_rule_graded_old_iterations_and_left_their_decisions(week: Week) -> None:
    for iteration in ("0000", "0001"):
        assert len(week.pointers("assets", "alpha", "rewards", iteration)) == 2
        assert len(week.pointers("assets", "alpha", "checkpoint", iteration)) == 1
        flips = week.artifact("alpha", "reward_flips", iteration)
        (name,) = [each for each in flips.names() if each.endswith(".parquet")]
        assert flips.table(name).num_rows > 0


def test_the_fork_trained_on_the_episodes_of_its_source(week: Week) -> None:
    source, fork = (week.artifact(name, "rollouts", key) for name, key in (("alpha", "0001"), ("gamma", "0000")))
    assert fork.ref == source.ref
    assert week.artifact("gamma", "checkpoint", "0000").ref != week.artifact("alpha", "checkpoint", "0001").ref
