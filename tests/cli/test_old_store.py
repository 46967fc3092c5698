"""A store of an older version is read, and says what is stale in it and why.

tests/old_stores/c813e3a.tar.xz is the store of two iterations of c813e3a.yaml under the name `old`, made by that
commit. Its safetensors files are left out: what only reads never opens them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from cli_history import Run
from typer.testing import CliRunner

from contracts.artifacts import Artifact, list_artifacts
from contracts.episodes import EPISODES
from contracts.store import Store, open_store
from contracts.upgrades import COLUMNS, META
from curation.dataset import DATASET_VERSION, MEMBERS, TRAIN, DatasetConfig, select_rows
from inference.rollouts import ROLLOUTS_VERSION
from tests.archives import extract
from triplane_dagster.cli.app import app
from triplane_dagster.staleness import stale_steps

ARCHIVE = Path(__file__).parents[1] / "old_stores" / "c813e3a.tar.xz"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("old")
    extract(ARCHIVE, folder)
    return open_store(str(folder / "trimmed"))


@pytest.fixture
def read(old: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    tiny = ARCHIVE.with_name("c813e3a.yaml").read_text()
    (tmp_path / "old.yaml").write_text(tiny.replace("name: tiny", "name: old"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        place = {"TRIPLANE_STORE": old.url, "COLUMNS": "200", "TRIPLANE_DEBUG": ""}
        done = CliRunner().invoke(app, arguments, env=place)
        return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)

    return run


def the(store: Store, kind: str) -> Artifact:
    return next(list_artifacts(store, kind))


def test_status_shows_the_old_iterations_and_names_what_is_stale(read: Run) -> None:
    printed = read("status").stdout
    assert "0000" in printed and "0001" in printed and "live: " in printed
    assert f"rollouts of 0000 to 0001: made by version 1 of the step, which is {ROLLOUTS_VERSION} now" in printed
    (found,) = json.loads(read("status", "--json").stdout)
    assert len(found["iterations"]) == 2 and all(each["decision"] == "live" for each in found["iterations"])
    stale = {each["step"]: each for each in found["stale"]}
    assert stale["dataset"] == {
        "step": "dataset",
        "iterations": ["0000", "0001"],
        "version": "1",
        "now": DATASET_VERSION,
    }
    assert "evaluation (evaluation_run)" in stale


def test_episodes_lineage_tasks_and_the_report_are_read(read: Run, tmp_path: Path) -> None:
    rows = json.loads(read("episodes", "list", "-e", "old", "--json").stdout)
    assert len(rows) == 20 and {row["solved"] for row in rows} == {False}
    episode = rows[0]["episode"]
    results = json.loads(read("evaluations", "list", "--json").stdout)
    assert results and {row["split"] for row in results} <= {"gate", "held_out"}
    shown = json.loads(read("episodes", "show", episode, "--json").stdout)
    assert shown["episode"] == episode and shown["datasets"] and shown["failure"] is None
    assert "made into" in read("lineage", episode).stdout
    listed = read("tasks", "list", "-e", str(tmp_path / "old.yaml"))
    assert listed.returncode == 0 and "20 of 32 tasks" in listed.stdout
    assert "task suite of old was made by version 1 of the step" in listed.stderr
    page = read("report", "-e", "old")
    assert Path(page.stdout.strip()).read_text().startswith("<!doctype html>")
    assert "stale in old" in page.stderr


def test_a_dry_run_says_what_the_next_iteration_would_make(read: Run, tmp_path: Path) -> None:
    steps = json.loads(read("iterate", "-e", str(tmp_path / "old.yaml"), "--dry-run", "--json").stdout)
    assert {step["partition"] for step in steps} == {None, "0002"}
    assert next(step["state"] for step in steps if step["step"] == "base_policy") == "will run"


def test_missing_columns_of_old_stores_read_as_absent(old: Store) -> None:
    for (kind, file), columns in COLUMNS.items():
        artifact = the(old, kind)
        whole, parts = artifact.table(file), artifact.table(file, list(columns))
        assert parts.schema == pa.schema(columns.items())
        assert parts.num_rows == whole.num_rows
        for name in columns:
            assert whole[name].null_count == whole.num_rows == parts[name].null_count
    for kind, facts in META.items():
        assert facts.items() <= the(old, kind).meta.items()


def test_old_tables_are_read_with_the_current_schema(old: Store) -> None:
    for kind, file, schema in (
        ("rollouts", "episodes.parquet", EPISODES),
        ("dataset", "train.parquet", TRAIN),
        ("dataset", "members.parquet", MEMBERS),
    ):
        found = {field.name: field.type for field in the(old, kind).table(file).schema}
        assert found.pop("group_reward_std", pa.float64()) == pa.float64()  # no longer written
        assert {field.name: field.type for field in schema} == found


def test_old_rollouts_and_rewards_build_a_current_dataset(old: Store) -> None:
    rewards = the(old, "rewards")
    rollouts = next(each for each in list_artifacts(old, "rollouts") if each.ref in rewards.manifest.parents.values())
    paths = [rollouts.path("episodes.parquet"), rollouts.path("sequences.parquet"), rewards.path("rewards.parquet")]
    train, members = select_rows(*paths, DatasetConfig(drop_zero_variance=False))
    assert train.num_rows == members.num_rows == rollouts.meta["episodes"]


def test_nothing_is_stale_in_a_store_without_work(tmp_path: Path) -> None:
    assert stale_steps(open_store(str(tmp_path)), "old") == []
