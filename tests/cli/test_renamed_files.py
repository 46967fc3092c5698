"""A file whose experiment was renamed stands for the new one; commands on iterations of the old one say so."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from contracts.artifacts import ArtifactRef
from contracts.digests import digest_of
from contracts.store import Store, open_store
from ops.quarantine.question import Reach
from resources.refs import write_ref
from resources.registry import Registry
from triplane_dagster.cli.app import app
from triplane_dagster.cli.experiments import file_in_store
from triplane_dagster.cli.quarantine import _loader, _plans
from triplane_dagster.quarantine import rebuild


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of experiment files: night.yaml is called night_v2."""
    files = tmp_path / "experiments"
    files.mkdir()
    (files / "night.yaml").write_text("name: night_v2\n")
    (files / "day.yaml").write_text("name: day\n")
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", str(files))
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    return files


@pytest.fixture
def store(folder: Path) -> Store:
    """A store that has iterations of `night`, `day` and `gone`."""
    store = open_store()
    ref = ArtifactRef(kind="rollouts", key=digest_of("key"), digest=digest_of("content"))
    for name in ("night", "day", "gone"):
        write_ref(store, name, "rollouts", "0000", ref)
    return store


def test_a_quarantine_names_an_experiment_whose_file_was_renamed_or_deleted(store: Store) -> None:
    iterations = [(name, "0000") for name in ("day", "gone", "night")]
    with dg.DagsterInstance.ephemeral() as instance:
        faults = rebuild(store, iterations, _loader(store, ""), instance).faults
    assert len(faults) == 2 and "gone was not rebuilt: no experiment 'gone'" in faults[0]
    assert "night was not rebuilt" in faults[1] and "is called night_v2" in faults[1]
    live = [{"experiment": name} for name, _ in iterations]
    plans, untrained = _plans(store, Reach(0, [], {}, live, iterations), _loader(store, ""))
    assert plans == [] and [each.partition(":")[0] for each in untrained] == [
        "gone is not trained again",
        "night is not trained again",
    ]


@pytest.mark.parametrize(
    "command",
    [["unpin", "night/0006"], ["fork", "night/0003", "--as", "other"], ["rollback", "-e", "night", "--yes"]],
)
def test_a_command_on_what_was_made_takes_no_file_of_another_experiment(command: list[str], store: Store) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "night.yaml is called night_v2" in done.stderr


def test_the_file_that_has_the_name_is_found_and_file_names_stand_for_what_they_hold(
    store: Store, folder: Path
) -> None:
    assert file_in_store(store, "day") == folder / "day.yaml"
    assert file_in_store(store, "night_v2") == folder / "night.yaml"
    assert file_in_store(open_store(str(folder / "empty")), "night") == folder / "night.yaml"
    (folder / "older.yaml").write_text("name: night\n")
    assert file_in_store(store, "night") == folder / "older.yaml"


def test_the_list_of_changes_is_that_of_the_experiment_in_the_store(store: Store, folder: Path) -> None:
    ref = ArtifactRef(kind="checkpoint", key=digest_of("key"), digest=digest_of("content"))
    assert Registry(store, "night").promote(ref, ref, parent="base", iteration="0000")
    write_ref(store, "night_v2", "rollouts", "0000", ref)
    for name, changes in (("night", 1), ("night_v2", 0), (str(folder / "night.yaml"), 0)):
        done = CliRunner().invoke(app, ["rollback", "-e", name, "--list", "--json"])
        assert len(json.loads(done.stdout)) == changes
    said = [CliRunner().invoke(app, ["rollback", "-e", name, "--list"]).stdout for name in ("night", "night_v2")]
    assert said[0].split()[0] == "night" and said[1] == "nothing of night_v2 was promoted yet\n"
