"""The services of deploy/compose.yaml as processes of this machine: the same commands, environment and health checks,
without containers. postgres and s3 are stood in for; redis-server is Debian's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.compose import ROOT, image_environment, services
from tests.deploy.postgres import WITH_PARENT
from tests.ports import free_port
from tests.webserver import ADD, LAUNCH, ask

PATIENCE_S = 600.0

RUN = """query ($id: ID!) { runOrError(runId: $id) { ... on Run {
  runId status startTime endTime parentRunId tags { key value }
  eventConnection { events { ... on MessageEvent { message } } } } } }"""
SENSOR = """query ($which: SensorSelector!) { sensorOrError(sensorSelector: $which) { ... on Sensor { id } } }"""
STOP = "mutation ($id: String!) { stopSensor(id: $id) { __typename } }"
RUNS = "{ runsOrError { ... on Runs { results { runId status parentRunId } } } }"


class LocalStack:
    """Processes by service, all in `folder`, which is what /app and the volumes are in the containers."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self._ports = {port: str(free_port()) for port in ("3000", "4000", "6379", "8000", "8080", "9465")}
        self._services = services(variables)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("home", "cache", "envd", "experiments", "tmp", "bridge", "journal"):
            (folder / name).mkdir()
        (folder / "deploy").symlink_to(ROOT / "deploy")
        shutil.copy(ROOT / "deploy" / "dagster-production.yaml", folder / "home" / "dagster.yaml")
        shutil.copy(ROOT / "tests" / "dagster" / "tiny.yaml", folder / "experiments")
        self.url = f"http://127.0.0.1:{self._ports['3000']}"
        self.api = f"http://127.0.0.1:{self._ports['8000']}"
        self.router = f"http://127.0.0.1:{self._ports['8080']}"

    def command(self, name: str) -> list[str]:
        """A service's command with what is only true inside a container replaced."""
        return [self._here(part) for part in self._services[name].command]

    def environment(self, name: str) -> dict[str, str]:
        """A service's whole environment: the image's, the service's, and nothing of ours but how to find programs."""
        build = self._services[name].definition.get("build")
        image = image_environment(build["target"]) if build else {}
        declared = {"PYTHONPATH": "/app:/app/kernels", **image, **self._services[name].environment}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {
            "PATH": path,
            "HOME": str(self.folder / "tmp"),
            "TMPDIR": str(self.folder / "tmp"),
            **{key: self._here(value) for key, value in declared.items()},
        }

    def run(self, name: str) -> str:
        """Run a service to its end and return what it printed. Fails when its exit status is not 0."""
        done = subprocess.run(
            self.command(name),
            cwd=self.folder,
            env=self.environment(name),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a service and wait until its own health check passes."""
        with self._log(name).open("ab") as log:
            child = subprocess.Popen(
                [*WITH_PARENT, *self.command(name)],
                cwd=self.folder,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = child
        deadline = time.monotonic() + PATIENCE_S
        while not self.healthy(name):
            assert child.poll() is None and time.monotonic() < deadline, f"{name}: {self.log(name)[-3000:]}"
            time.sleep(1)
        return child

    def healthy(self, name: str) -> bool:
        """What the health check of a service says."""
        check = [self._here(part) for part in self._services[name].healthcheck]
        done = subprocess.run(check, cwd=self.folder, env=self.environment(name), capture_output=True, timeout=60)
        return done.returncode == 0

    def kill(self, name: str) -> None:
        """What a container's sudden end is: every process of it, at once."""
        child = self._running.pop(name)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def stop(self) -> dict[str, int]:
        """As `docker compose stop` does, last started first.

        Returns each service's exit status; one that does not end is killed: -9.
        """
        ended: dict[str, int] = {}
        for name, child in reversed(self._running.items()):
            child.terminate()
            try:
                ended[name] = child.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                ended[name] = child.wait()
        self._running.clear()
        return ended

    def pid(self, name: str) -> int:
        """The process of a service."""
        return self._running[name].pid

    def log(self, name: str) -> str:
        """What a service printed."""
        return self._log(name).read_text(errors="replace")

    def launch(self, job: str, partition: str | None = None) -> str:
        """Put a run into the queue, as the launchpad does. Returns its id."""
        where = {"repositoryLocationName": "triplane", "repositoryName": "__repository__"}
        tags = [] if partition is None else [{"key": "dagster/partition", "value": partition}]
        if partition is not None:
            self._ask(ADD, name="tiny", key=partition, where=where)
        params = {"selector": {**where, "jobName": job}, "runConfigData": {}, "executionMetadata": {"tags": tags}}
        launched = self._ask(LAUNCH, params=params)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id: str = launched["run"]["runId"]
        return run_id

    def stop_sensor(self, name: str) -> None:
        """Turn a sensor off, as its switch does."""
        where = {"repositoryLocationName": "triplane", "repositoryName": "__repository__", "sensorName": name}
        stopped = self._ask(STOP, id=self._ask(SENSOR, which=where)["sensorOrError"]["id"])["stopSensor"]
        assert stopped["__typename"] == "StopSensorMutationResult", stopped

    def run_of(self, run_id: str) -> dict[str, Any]:
        """One run as the web server knows it."""
        found: dict[str, Any] = self._ask(RUN, id=run_id)["runOrError"]
        return found

    def wait_for(self, run_id: str, *statuses: str) -> dict[str, Any]:
        """The run, once it is in one of these states. Fails when it comes to another end."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            run = self.run_of(run_id)
            if run["status"] in statuses:
                return run
            over = run["status"] in ("SUCCESS", "FAILURE", "CANCELED") or time.monotonic() > deadline
            assert not over, f"{json.dumps(run, indent=1)}\n{self.log('daemon')[-2000:]}"
            time.sleep(0.5)

    def retry_of(self, run_id: str) -> str:
        """The run that was launched in place of this one, without anyone asking."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for run in self._ask(RUNS)["runsOrError"]["results"]:
                if run["parentRunId"] == run_id:
                    found: str = run["runId"]
                    return found
            time.sleep(1)
        raise AssertionError(f"run {run_id} was not launched again: {self.log('daemon')[-2000:]}")

    def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        return ask(self.url, query, **variables)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _here(self, text: str) -> str:
        for inside, port in self._ports.items():
            text = port if text == inside else text.replace(f":{inside}", f":{port}")
        for inside, outside in {
            "0.0.0.0": "127.0.0.1",
            "code-location": "127.0.0.1",
            "dns:replica": "dns:localhost",
            "redis://redis": "redis://127.0.0.1",
            "/run/envd": f"{self.folder}/envd",
            "/run/bridge": f"{self.folder}/bridge",
            "/var/lib/triplane/bridge": f"{self.folder}/journal",
            "/app": str(ROOT),
            "/var/lib/triplane/cache": f"{self.folder}/cache",
            "/var/lib/triplane/dagster": f"{self.folder}/home",
        }.items():
            text = text.replace(inside, outside)
        return text


def descendants(pid: int) -> dict[int, str]:
    """Processes below this one, with their command lines."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    found: dict[int, str] = {}
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= {child: lines[child] for child in level}
    return found
