"""A running `triplane ui` (web server, daemon, code server), operated through the GraphQL of its pages, and killed in
parts.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envd.sandbox.proctree import descendants
from tests.acceptance.laboratory import Laboratory
from tests.webserver import LAUNCH, ask, wait_until_up

LOCATION = "triplane_dagster.definitions"
WHERE = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}
PATIENCE_S = 300.0
"""A busy machine takes this long to load the definitions, or to run an iteration."""
RUNS = """
query ($filter: RunsFilter) {
  runsOrError(filter: $filter) {
    ... on Runs { results { runId jobName status startTime endTime tags { key value } } }
  }
}"""
BACKFILL = """
mutation ($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  }
}"""
SCHEDULE = """
query ($which: InstigationSelector!) {
  instigationStateOrError(instigationSelector: $which) {
    ... on InstigationState { id status ticks(limit: 100) { status skipReason } }
  }
}"""


@dataclass
class Run:
    """A run as the UI shows it."""

    id: str
    job: str
    status: str
    partition: str | None
    tags: dict[str, str]
    start: float | None
    end: float | None


@dataclass
class DagsterUi:
    """`triplane ui` in a laboratory's folder."""

    lab: Laboratory
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = self.lab.folder / "ui.log"

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                self.lab.command("ui", "--port", str(self.port)),
                cwd=self.lab.folder,
                env={**self.lab.env, **self.environment},
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        wait_until_up(self.url, self.process, self.log, PATIENCE_S)

    def stop(self) -> None:
        """End it as a service manager does; what does not end by that is killed."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL for every process of it at once, as in a machine failure, and for what its runs started."""
        below = descendants(self.process.pid)
        for pid in (self.process.pid, *below):
            _signal(pid, signal.SIGSTOP)
        for pid in (self.process.pid, *below):
            _signal(pid, signal.SIGKILL)
        self.process.wait(10)

    def kill_one(self, part: str) -> bool:
        """SIGKILL for a descendant whose command line contains `part`. Returns whether there is one."""
        for pid in descendants(self.process.pid):
            if part in _command(pid):
                _signal(pid, signal.SIGKILL)
                return True
        return False

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Data of a GraphQL answer."""
        return ask(self.url, query, **variables)

    def runs(self, **filters: Any) -> list[Run]:
        """Runs, newest first."""
        found = []
        for row in self.ask(RUNS, filter=filters)["runsOrError"]["results"]:
            tags = {tag["key"]: tag["value"] for tag in row["tags"]}
            partition = tags.get("dagster/partition")
            found.append(
                Run(row["runId"], row["jobName"], row["status"], partition, tags, row["startTime"], row["endTime"])
            )
        return found

    def launch(self, job: str, config: Any = None) -> str:
        """Launch a job from its launchpad. Returns the run's id."""
        params = {"selector": {**WHERE, "jobName": job}, "runConfigData": config or {}}
        launched = self.ask(LAUNCH, params=params)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id: str = launched["run"]["runId"]
        return run_id

    def backfill(self, experiment: str, assets: list[str], partitions: list[str]) -> str:
        """Launch a backfill of some assets of an experiment. Returns its id."""
        params = {
            "assetSelection": [{"path": [experiment, asset]} for asset in assets],
            "partitionNames": partitions,
        }
        launched = self.ask(BACKFILL, params=params)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        backfill: str = launched["backfillId"]
        return backfill

    def reload(self) -> None:
        """Reload the code location, as after an edit of an experiment file."""
        query = "mutation ($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) { __typename } }"
        done = self.ask(query, name=LOCATION)["reloadRepositoryLocation"]["__typename"]
        assert done == "WorkspaceLocationEntry", done

    def schedule(self, name: str) -> dict[str, Any]:
        """State of a schedule: id, status, ticks (newest first)."""
        found: dict[str, Any] = self.ask(SCHEDULE, which={**WHERE, "name": name})["instigationStateOrError"]
        return found

    def start_schedule(self, name: str) -> None:
        """Switch a schedule on."""
        query = "mutation ($which: ScheduleSelector!) { startSchedule(scheduleSelector: $which) { __typename } }"
        done = self.ask(query, which={**WHERE, "scheduleName": name})["startSchedule"]["__typename"]
        assert done == "ScheduleStateResult", done

    def stop_schedule(self, name: str) -> None:
        """Switch a schedule off."""
        query = "mutation ($id: String!) { stopRunningSchedule(id: $id) { __typename } }"
        done = self.ask(query, id=self.schedule(name)["id"])["stopRunningSchedule"]["__typename"]
        assert done == "ScheduleStateResult", done

    def wait_until(self, reached: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
        """Wait for a truthy answer, and return it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the UI ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            found = reached()
            if found:
                return found
            time.sleep(0.3)
        runs = "\n".join(map(str, self.runs()[:12]))
        raise AssertionError(f"not within {seconds:g} s: {what}\n{runs}\n{self.log.read_text()[-3000:]}")

    def wait_for_run(self, run_id: str, *statuses: str) -> Run:
        """Wait until a run has one of these statuses."""

        def reached() -> Run | None:
            (run,) = self.runs(runIds=[run_id])
            return run if run.status in statuses else None

        found: Run = self.wait_until(reached, f"run {run_id} {statuses}")
        return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
