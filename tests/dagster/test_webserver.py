"""Iterations launched through the web server's GraphQL, run by the daemon, continued by the sensor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.store import open_store
from resources.experiment import Experiment
from resources.registry import Registry
from tests.ports import free_port
from tests.webserver import LAUNCH, ask, wait_until_up
from triplane_dagster.jobs import EXPERIMENT_TAG

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 540.0

RUNS = "{ runsOrError { ... on Runs { results { runId jobName status startTime endTime tags { key value } } } } }"


class Server:
    """A running `dagster dev` and its GraphQL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.where = {"repositoryLocationName": "triplane_dagster.definitions", "repositoryName": "__repository__"}

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        return ask(self.url, query, **variables)

    def launch(self, job: str, assets: list[str] | None = None, config: Any = None, **tags: str) -> str:
        """Launch a job or, as an asset's page does, these assets of tiny. Returns the run's id."""
        chosen = {"assetSelection": [{"path": ["tiny", each]} for each in assets or ()]}
        params = {
            "selector": {**self.where, "jobName": job, **(chosen if assets else {})},
            "runConfigData": config or {},
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
        }
        launched = self.ask(LAUNCH, params=params)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id: str = launched["run"]["runId"]
        return run_id

    def wait_for(self, successes: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE_S
        runs: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            runs = self.ask(RUNS)["runsOrError"]["results"]
            assert all(run["status"] not in ("FAILURE", "CANCELED") for run in runs), runs
            if sum(run["status"] == "SUCCESS" for run in runs) >= successes:
                return runs
            time.sleep(1)
        raise AssertionError(f"{successes} successful runs did not come in {PATIENCE_S:g} s: {runs}")


def environment(folder: Path) -> dict[str, str]:
    """Store, Dagster instance and experiments of the test."""
    return {
        **os.environ,
        "TRIPLANE_EXPERIMENTS": str(Path(__file__).parent),
        "TRIPLANE_STORE": str(folder / "store"),
        "DAGSTER_HOME": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    shipped = (REPOSITORY / "dagster.yaml").read_text()
    assert "max_concurrent_runs: 1" in shipped
    # with room for more, what keeps runs of one experiment apart is their pool
    (tmp_path / "dagster.yaml").write_text(shipped.replace("max_concurrent_runs: 1", "max_concurrent_runs: 3"))
    port = free_port()
    command = [
        Path(sys.executable).with_name("dagster"),
        "dev",
        "-m",
        "triplane_dagster.definitions",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until_up(f"http://127.0.0.1:{port}", child, tmp_path / "log", PATIENCE_S)
            yield Server(f"http://127.0.0.1:{port}")
        finally:
            stop(child)


def stop(child: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in its terminal does; what does not end by that is killed, the whole session."""
    os.killpg(child.pid, signal.SIGINT)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)


@pytest.mark.timeout(900)
def test_iterations_launched_over_graphql_succeed_in_sequence(server: Server, tiny: Experiment, tmp_path: Path) -> None:
    server.launch(f"{tiny.name}_train")  # as its launchpad is filled in: two iterations
    runs = server.wait_for(4)
    assert [run["jobName"] for run in reversed(runs)] == [
        f"{tiny.name}_{job}" for job in ("train", "base", "iteration", "iteration")
    ]
    partitions = {tag["value"] for run in runs for tag in run["tags"] if tag["key"] == "dagster/partition"}
    assert partitions == {"0000", "0001"}
    history = Registry(open_store(str(tmp_path / "store")), tiny.name).history()
    assert [entry.iteration for entry in history] == ["0000", "0001"]


@pytest.mark.timeout(900)
def test_runs_from_asset_pages_of_one_experiment_never_run_at_once(server: Server) -> None:
    """The first one trains the base policy, which takes long enough for the other to start beside it."""
    asked = [server.launch("__ASSET_JOB", ["base_policy"]) for _ in range(2)]
    runs = {run["runId"]: run for run in server.wait_for(2)}
    assert all(EXPERIMENT_TAG not in {tag["key"] for tag in run["tags"]} for run in runs.values()), (
        "what separates them"
    )
    (_, first_end), (second_start, _) = sorted((runs[each]["startTime"], runs[each]["endTime"]) for each in asked)
    assert first_end <= second_start
