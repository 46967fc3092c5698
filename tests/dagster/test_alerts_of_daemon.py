"""A real `triplane ui`: its daemon finds a scheduled experiment overdue and a run failed, and tells of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from alert_receiver import Hook, listening

from tests.acceptance.dagster_ui import DagsterUi
from tests.acceptance.laboratory import ROOT, Laboratory
from triplane_dagster.alerts import VARIABLE
from triplane_dagster.freshness import NIGHTLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FRESHNESS = """
query ($keys: [AssetKeyInput!]) {
  assetNodes(assetKeys: $keys) { assetKey { path } freshnessStatusInfo { freshnessStatus } }
}"""
MATERIALIZED = """
mutation ($params: ReportRunlessAssetEventsParams!) {
  reportRunlessAssetEvents(eventParams: $params) {
    __typename
    ... on PythonError { message }
  }
}"""


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with listening() as made:
        yield made


@pytest.fixture(scope="module")
def ui(hook: Hook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterUi]:
    """An experiment that is overdue after a minute and a half."""
    folder = tmp_path_factory.mktemp("alerts")
    lab = Laboratory(folder, folder / "experiments" / "tiny.yaml")
    lab.environment |= {"TRIPLANE_EXPERIMENTS": str(folder / "experiments"), VARIABLE: hook.url}
    lab.environment |= {"FRESHNESS_DAEMON_INTERVAL_SECONDS": "2", "TRIPLANE_STORE": str(folder / ".triplane" / "store")}
    lab.experiment_file.parent.mkdir()
    plan = 'schedule: {cron: "* * * * *", max_hours: 0.01}\n'
    lab.experiment_file.write_text((ROOT / "tests" / "dagster" / "tiny.yaml").read_text() + plan)
    (folder / "workspace.yaml").write_text((ROOT / "workspace.yaml").read_text())
    ui = DagsterUi(lab)
    ui.start()
    yield ui
    ui.stop()


def freshness(ui: DagsterUi) -> dict[str, str]:
    keys = [{"path": ["tiny", name]} for name in NIGHTLY]
    nodes = ui.ask(FRESHNESS, keys=keys)["assetNodes"]
    return {node["assetKey"]["path"][1]: node["freshnessStatusInfo"]["freshnessStatus"] for node in nodes}


def materialize(ui: DagsterUi) -> None:
    """Tell Dagster of new materializations, as an iteration does."""
    for name in NIGHTLY:
        event: dict[str, Any] = {"eventType": "ASSET_MATERIALIZATION", "assetKey": {"path": ["tiny", name]}}
        done = ui.ask(MATERIALIZED, params=event)["reportRunlessAssetEvents"]
        assert done["__typename"] == "ReportRunlessAssetEventsSuccess", done


def test_an_overdue_experiment_is_shown_and_told_and_recovers(ui: DagsterUi, hook: Hook) -> None:
    def all_are(status: str) -> bool:
        return freshness(ui) == dict.fromkeys(NIGHTLY, status)

    def told() -> list[str]:
        return [each["text"] for each in hook.posted if "is overdue" in each["text"]]

    assert all_are("UNKNOWN")
    materialize(ui)
    ui.wait_until(lambda: all_are("HEALTHY"), "fresh assets")
    assert not told()
    ui.wait_until(lambda: all_are("DEGRADED"), "overdue assets")
    ui.wait_until(told, "an alert")
    assert told()[0].startswith("tiny is overdue: no dataset since ")
    assert "see whether tiny_nightly is on" in told()[0]
    materialize(ui)
    ui.wait_until(lambda: all_are("HEALTHY"), "fresh assets again")
    ui.wait_until(lambda: len(told()) == 2, "an alert of the next outage")
    assert all_are("DEGRADED")


def test_a_failed_run_is_told(ui: DagsterUi, hook: Hook) -> None:
    run = ui.launch("tiny_rollback", {"ops": {"tiny_roll_back": {"config": {"to": "0001", "reason": ""}}}})
    ui.wait_for_run(run, "FAILURE")
    found = ui.wait_until(lambda: [each for each in hook.posted if each.get("run_id") == run], "an alert")
    assert found[0]["text"].startswith("tiny_rollback failed: ") and "no earlier policy" in found[0]["error"]
