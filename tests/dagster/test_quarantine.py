"""Quarantined episodes leave the datasets, and a tainted live policy is replaced by one that did not see them."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_world import World
from test_recall import TRAININGS, History, Walk, made_by, rule_of
from typer.testing import CliRunner

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts, open_artifact
from contracts.digests import digest_of
from contracts.errors import ArtifactMissing
from contracts.store import Store, open_store
from curation.dataset import COUNTED, COUNTED_IN_BATCH
from ops.quarantine.question import reach_of, reach_of_marks
from resources.quarantine import MARKED, Lift, Mark, Quarantine
from resources.refs import require_ref
from resources.registry import Registry
from triplane_dagster.cli.app import app

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny.yaml"
QUESTIONS = (
    *(("task", f"t{number}") for number in range(5)),
    ("tool", "exec"),
    ("tool", "read_file"),
    *(("rule", rule) for rule in ("0-", "1", "1-", "10-")),
    ("image", digest_of(["image", 1])),
)


# what a mark means, on random stores


def matches(what: str, value: str, row: dict[str, Any]) -> bool:
    if what == "tool":
        return value in [call["name"] for call in row["tool_calls"]]
    return bool(row[{"task": "task_id", "image": "image_digest", "episode": "episode_id"}[what]] == value)


def marked_in(walk: Walk, dataset: Artifact, marks: list[tuple[str, str]]) -> set[str]:
    """Ids of a dataset's episodes that questions concern."""
    rollouts, rewards = (dataset.manifest.parents[role].uri for role in ("rollouts", "rewards"))
    rule = rule_of(walk.all[rewards])
    return {
        row["episode_id"]
        for what, value in marks
        for row in walk.rows(rollouts, "episodes")
        if (rule.startswith(value) if what == "rule" else matches(what, value, row))
    }


def walked(walk: Walk, marks: list[tuple[str, str]]) -> tuple[Any, ...]:
    """Datasets, checkpoints with distances and experiments that questions concern, by reading everything."""
    datasets = {}
    trained = [each.manifest for each in walk.of("checkpoint").values() if "dataset" in each.manifest.parents]
    in_batch = {made.parents["dataset"].uri for made in trained if made.config["rl"] == TRAININGS[1]}
    for uri, each in walk.of("dataset").items():
        reasons = {*COUNTED, *(COUNTED_IN_BATCH if uri in in_batch else ())}
        ids = marked_in(walk, each, marks)
        rows = [row for row in walk.rows(uri, "members") if row["episode_id"] in ids]
        trains, counted = sum(row["kept"] for row in rows), sum(row["reason"] in reasons for row in rows)
        if trains + counted:
            datasets[uri] = (each.ref.digest, trains, counted)
    distances = walk.distances(datasets)
    return sorted(datasets.values()), sorted(distances.items()), walk.live(distances)


def answered(found: Any) -> tuple[Any, ...]:
    return (
        sorted((row["digest"], row["trains"], row["counted"]) for row in found.datasets),
        sorted((uri, row["distance"]) for uri, row in found.checkpoints.items()),
        [row["experiment"] for row in found.live],
    )


def check_marks(seed: int, folder: Path) -> None:
    history = made_by(seed, folder)
    store, draw, quarantine, walk = history.store, history.draw, Quarantine(history.store), Walk(history.store)
    ids = sorted({row["episode_id"] for uri in walk.of("rollouts") for row in walk.rows(uri, "episodes")})
    made: list[tuple[Mark, tuple[str, str]]] = []
    for what, value in [*draw.sample(QUESTIONS, 2), ("episode", draw.choice(ids))]:
        try:
            found, marked = reach_of(store, what, value)  # type: ignore[arg-type]
        except ArtifactMissing:
            assert walked(walk, [(what, value)]) == ([], [], [])
            continue
        assert answered(found) == walked(walk, [(what, value)])
        mark, new = quarantine.mark(what, value, marked, "random")
        assert new and quarantine.mark(what, value, marked, "again") == (mark, False)
        assert answered(reach_of_marks(store, [mark])) == answered(found)
        made.append((mark, (what, value)))
    draw.shuffle(made)
    for mark, _ in made[: draw.randrange(len(made))] if made else []:
        quarantine.lift(mark.number, "it was fine")
    lifted = {mark.number for mark, _ in made} - {mark.number for mark in quarantine.marks()}
    force = [question for mark, question in made if mark.number not in lifted]
    assert len(force) == len(quarantine.marks())
    assert answered(reach_of_marks(store, quarantine.marks())) == walked(walk, force)
    for each in walk.of("dataset").values():
        parents = each.manifest.parents
        concerned = quarantine.episodes(parents["rollouts"], parents["rewards"])
        assert [*concerned] == sorted(marked_in(walk, each, force))
        for episode, marks in concerned.items():
            assert set(quarantine.of_episode(episode)) >= set(marks)


@pytest.mark.parametrize("seed", range(2))
def test_marks_equal_a_walk_over_everything(seed: int, tmp_path: Path) -> None:
    check_marks(seed, tmp_path)


@pytest.mark.timeout(1800)
def test_marks_equal_a_walk_over_everything_of_60_stores(tmp_path: Path) -> None:
    for seed in range(2, 62):
        check_marks(seed, tmp_path / str(seed))


def test_concurrent_marks_are_numbered_without_gaps_and_the_same_one_is_made_once(tmp_path: Path) -> None:
    history = History(open_store(str(tmp_path)), random.Random(5))
    history.iteration("one", 0)
    quarantine = Quarantine(history.store)
    table = MARKED.empty_table()

    def mark(number: int) -> tuple[Mark, bool]:
        return quarantine.mark("task", f"t{number % 3}", table, "concurrent")

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(mark, range(12)))
    assert sorted(each.number for each, new in found if new) == [1, 2, 3]
    assert [each.value for each in quarantine.marks()] == [each.value for each in quarantine.history()]  # type: ignore[union-attr]
    with ThreadPoolExecutor(6) as pool:
        lifted = list(pool.map(lambda _: quarantine.lift(2, "fine"), range(6)))
    assert sum(new for _, new in lifted) == 1
    assert [each.number for each in quarantine.marks()] == [1, 3]
    assert isinstance(quarantine.history()[-1], Lift)


# the real command on two iterations


@dataclass(frozen=True)
class Place:
    """A copy of the store after two iterations, with its own Dagster records."""

    folder: Path
    store: Store
    env: dict[str, str]
    task: str
    """Of iteration 0000."""

    def ref(self, asset: str, iteration: str) -> ArtifactRef:
        return require_ref(self.store, "tiny", asset, iteration)

    @property
    def live(self) -> str:
        found = Registry(self.store, "tiny").live()
        assert found is not None
        return found.policy.digest

    def state(self) -> tuple[Any, ...]:
        """Everything that a command may change, without times."""
        history = Registry(self.store, "tiny").history()
        refs = [self.ref(asset, "0000") for asset in ("dataset", "checkpoint", "evaluation", "sampler")]
        return [each.policy.digest for each in history], refs, Quarantine(self.store).marks()[0].marked


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def place(ran: World, untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    shutil.copytree(untouched, tmp_path / "store")
    (tmp_path / "experiments").mkdir()
    shutil.copy(TINY, tmp_path / "experiments" / "tiny.yaml")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    env = {
        "TRIPLANE_STORE": str(tmp_path / "store"),
        "TRIPLANE_EXPERIMENTS": str(tmp_path / "experiments"),
        "DAGSTER_HOME": str(tmp_path / "home"),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
        "TRIPLANE_DEBUG": "",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    store = open_store()
    rollouts = open_artifact(store, require_ref(store, "tiny", "rollouts", "0000"))
    task = rollouts.table("episodes.parquet", ["task_id"])["task_id"][0].as_py()
    return Place(tmp_path, store, env, task)


def triplane(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)


def killed_at(place: Place, point: str, *arguments: str) -> None:
    program = "from triplane_dagster.cli import main; main()"
    said = place.folder / "said"
    with said.open("w") as log:  # no pipe: children that capture Dagster's logs outlive their parent
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, **place.env, "TRIPLANE_KILL_AT": point},
            stdout=log,
            stderr=log,
            timeout=240,
            check=False,
        )
    assert done.returncode != 0 and "killed by TRIPLANE_KILL_AT" in said.read_text()


def test_a_quarantined_task_leaves_its_dataset_and_a_lift_brings_back_the_same_artifact(place: Place) -> None:
    before, other, live = place.ref("dataset", "0000"), place.ref("dataset", "0001"), place.live
    dry = triplane("quarantine", "--task", place.task, "--dry-run", "--json")
    assert json.loads(dry.stdout)["live"][0]["digest"] == live and not Quarantine(place.store).history()

    done = triplane("quarantine", "--task", place.task, "--yes", "--reason", "its tests are public")
    assert done.returncode == 0, done.stderr
    assert f"{live[:12]}, which was trained on them, is live in tiny" in done.stderr
    assert f"`triplane quarantine --task {place.task} --retrain`" in done.stderr
    after = open_artifact(place.store, place.ref("dataset", "0000"))
    assert after.ref != before and place.ref("dataset", "0001") == other and place.live == live
    members = {row["episode_id"]: row for row in after.table("members.parquet").to_pylist()}
    marked = [*Quarantine(place.store).episodes(place.ref("rollouts", "0000"), place.ref("rewards", "0000"))]
    assert len(marked) == 4 and all(members[each]["reason"] == "quarantined" for each in marked)
    assert all(members[each]["reward"] is None for each in marked), "no baseline contains it"
    shown = triplane("episodes", "show", marked[0])
    assert "quarantined by mark 1: its tests are public" in shown.stdout

    again = triplane("quarantine", "--task", place.task, "--yes", "--json")
    assert json.loads(again.stdout)["rebuilt"] == [] and json.loads(again.stdout)["mark"]["number"] == 1
    artifacts = {each.ref for each in list_artifacts(place.store, "dataset")}
    assert triplane("quarantine", "--lift", "1").returncode == 0
    assert place.ref("dataset", "0000") == before
    assert {each.ref for each in list_artifacts(place.store, "dataset")} == artifacts
    listed = json.loads(triplane("quarantine", "--list", "--json").stdout)
    assert [(row["what"], row["state"]) for row in listed] == [(f"task {place.task}", "lifted"), ("lifts 1", None)]


def test_a_dataset_that_was_reported_in_the_ui_is_shown_again(place: Place) -> None:
    arguments = ("quarantine", "--task", place.task, "--yes", "--json")
    assert triplane(*arguments).returncode == 0
    dataset = dg.AssetKey(["tiny", "dataset"])
    wanted = dg.AssetRecordsFilter(dataset, asset_partitions=["0000"])
    with dg.DagsterInstance.get() as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(dataset, partition="0000"))
        again = triplane(*arguments)
        assert again.returncode == 0 and json.loads(again.stdout)["rebuilt"] == [], again.stderr
        (record,) = instance.fetch_materializations(wanted, limit=1).records
    assert record.asset_materialization is not None
    assert record.asset_materialization.metadata["digest"].value == place.ref("dataset", "0000").digest


def test_retraining_makes_a_policy_live_that_saw_no_quarantined_episode(place: Place) -> None:
    rollouts, live = place.ref("rollouts", "0000"), place.live
    done = triplane("quarantine", "--task", place.task, "--yes", "--retrain", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["retrained"]
    assert (row["iteration"], row["decision"]) == ("0000", "live") and "0001" in row["superseded"]
    assert place.live == row["candidate"] != live
    assert place.ref("rollouts", "0000") == rollouts, "nothing is sampled again"
    trained = open_artifact(place.store, place.ref("checkpoint", "0000"))
    assert trained.manifest.parents["dataset"] == place.ref("dataset", "0000")
    reach = reach_of_marks(place.store, Quarantine(place.store).marks())
    assert trained.ref.uri not in reach.checkpoints and not reach.live
    before = place.state()
    again = triplane("quarantine", "--task", place.task, "--yes", "--retrain", "--json")
    assert json.loads(again.stdout)["retrained"] == [] and place.state() == before


@pytest.mark.parametrize(
    "point", ["episodes-marked", "rolled-back", "reference-written", "state-committed", "policy-promoted"]
)
def test_a_killed_quarantine_is_finished_by_the_same_command(point: str, place: Place, tmp_path: Path) -> None:
    arguments = ("quarantine", "--task", place.task, "--yes", "--retrain", "--json")
    killed_at(place, point, *arguments)
    assert len(Quarantine(place.store).marks()) == 1
    done = triplane(*arguments)
    assert done.returncode == 0, done.stderr
    history = Registry(place.store, "tiny").history()
    back = [each for each in history if each.rollback]
    assert len(back) == 1 and history[-1].iteration == "0000" and history[-1].number == back[0].number + 1
    assert place.live == place.ref("checkpoint", "0000").digest
    before = place.state()
    assert triplane(*arguments).returncode == 0 and place.state() == before


def test_a_dataset_without_a_trusted_row_is_one_error_that_names_the_mark(place: Place) -> None:
    before, live = place.ref("dataset", "0000"), place.live
    rewards = open_artifact(place.store, place.ref("rewards", "0000"))
    for more in ([], ["--retrain"]):
        done = triplane("quarantine", "--reward-rule", rule_of(rewards), "--yes", *more)
        assert done.returncode == 1 and "error: mark 1 stands" in done.stderr
        assert "every episode of tiny/0000 is quarantined, by mark 1" in done.stderr
        assert "triplane quarantine --lift 1" in done.stderr
    assert place.ref("dataset", "0000") == before and place.live == live


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--task", 'it\'s "none"'], "no episode in"),
        (["--episode", ""], "give one of --episode"),
        (["--task", "a", "--tool", "b"], "give one of --episode"),
        (["--lift", "9"], "there is no mark 9"),
        (["--lift", "9", "--task", "a"], "ask no question"),
        (["--task", "TASK"], "add --yes"),
        (["--task", "TASK", "--yes", "--reason", " "], "the reason is empty"),
    ],
)
def test_an_impossible_quarantine_is_one_line_and_changes_nothing(
    arguments: list[str], named: str, place: Place
) -> None:
    done = triplane("quarantine", *(place.task if each == "TASK" else each for each in arguments))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1 and not Quarantine(place.store).history()
