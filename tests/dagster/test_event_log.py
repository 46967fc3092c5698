"""Dagster's SQLite event log stays open during a run, since closing it after each event takes several fsyncs."""

import re
from pathlib import Path

import dagster as dg
import pytest

from contracts.errors import ConfigError
from resources.event_log import event_log_kept_open
from resources.ref_io import RefIOManager
from resources.store import StoreResource
from triplane_dagster.run import open_instance


def write_ahead_logs(folder: Path) -> set[str]:
    return {path.name.removesuffix(".db-wal") for path in folder.rglob("*.db-wal") if path.parent.name == "runs"}


def test_the_databases_of_a_run_stay_open_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    seen: list[set[str]] = []

    @dg.asset(key=["some", "asset"])
    def asset(context: dg.AssetExecutionContext) -> None:
        for _ in range(2):
            context.log_event(dg.AssetObservation(["some", "asset"]))
            seen.append(write_ahead_logs(tmp_path))

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        resources = {"io_manager": RefIOManager(store=StoreResource())}
        done = dg.materialize([asset], instance=instance, resources=resources)
        assert seen == [{done.run_id, "index"}] * 2
        assert not write_ahead_logs(tmp_path)
        observed = instance.fetch_observations(dg.AssetKey(["some", "asset"]), limit=10).records
    assert len(observed) == 2


def test_other_event_logs_are_left_alone(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance, event_log_kept_open(instance, "a-run"):
        assert instance.get_runs_count() == 0
    with event_log_kept_open(None, None):
        pass


@pytest.mark.parametrize(("name", "home"), [("what?", False), ("a%41", False), ("a[1]", True), ("a%20b", True)])
def test_a_folder_that_dagster_takes_for_another_one_is_refused(
    name: str, home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DAGSTER_HOME", str(folder) if home else "")
    with pytest.raises(ConfigError, match=rf"Dagster misreads the path .*{re.escape(name)}: rename the folder"):
        open_instance()
    assert [path.name for path in tmp_path.iterdir()] == [name] and not list(folder.iterdir())
