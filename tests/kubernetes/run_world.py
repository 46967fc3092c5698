"""Runs of the tiny experiment on a stand-in cluster: Dagster's daemon, our run launcher, our executor of step pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from contracts.store import open_store
from ops.graph import ONCE, PER_ITERATION
from resources.experiment import load_experiment
from resources.refs import read_ref
from tests.kubernetes.api_server import NAMESPACE, Cluster, serving
from tests.kubernetes.objects import Object
from triplane_dagster.sequence import run_iterations

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
PATIENCE_S = 900.0
_FINAL = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


class RunWorld:
    """A deployment in `folder`: its Dagster instance, its store, and the cluster that its runs use."""

    def __init__(
        self, folder: Path, cluster: Cluster, instance: dg.DagsterInstance, variables: Mapping[str, str]
    ) -> None:
        self.folder, self.cluster, self.instance = folder, cluster, instance
        self.environment = {**os.environ, **variables, "KUBECONFIG": str(cluster.folder / "kubeconfig.json")}

    def launch(self, job: str, partition: str | None = None) -> str:
        """Launch a run as the command line of Dagster does. Returns its id."""
        before = {run.run_id for run in self.instance.get_runs()}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "dagster",
            "job",
            "launch",
            "-m",
            "triplane_dagster.definitions",
        ]
        tags = {} if partition is None else {"dagster/partition": partition}
        done = subprocess.run(
            [*command, "-j", job, "--tags", json.dumps(tags)],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        (run_id,) = {run.run_id for run in self.instance.get_runs()} - before
        return run_id

    def wait_for(self, run_id: str, status: dg.DagsterRunStatus = dg.DagsterRunStatus.SUCCESS) -> dg.DagsterRun:
        """The run, once it has this final state. Fails when it comes to another end."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            run = self.instance.get_run_by_id(run_id)
            assert run is not None and time.monotonic() < deadline, self.told(run_id)
            if run.status in _FINAL:
                assert run.status is status, self.told(run_id)
                return run
            time.sleep(0.2)

    def retry_of(self, run_id: str) -> str:
        """The run that Dagster launched in place of this one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for run in self.instance.get_runs():
                if run.parent_run_id == run_id:
                    return run.run_id
            time.sleep(0.2)
        raise AssertionError(self.told(run_id))

    def pod_of(self, job: str) -> Object:
        """A running pod whose Job's name begins so."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pod in self.cluster.pods("Running"):
                if pod["metadata"]["name"].startswith(job):
                    return pod
            time.sleep(0.02)
        raise AssertionError(f"no pod of {job} runs: {[pod['metadata']['name'] for pod in self.cluster.pods()]}")

    def step_pod(self, step: str) -> Object:
        """A running pod of a step."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for pod in self.cluster.pods("Running"):
                if pod["metadata"]["labels"].get("dagster/op") == step:
                    return pod
            time.sleep(0.02)
        raise AssertionError(f"no pod of {step} runs")

    def events(self, run_id: str, kind: dg.DagsterEventType) -> list[dg.DagsterEvent]:
        """Events of a run."""
        return [each.get_dagster_event() for each in self.instance.all_logs(run_id, of_type=kind)]

    def check_against_one_process(self, folder: Path) -> None:
        """Compare each artifact of the tiny experiment's first iteration with that of one process, made in `folder`."""
        pods, alone = open_store(str(self.folder / "store")), open_store(str(folder))
        with pytest.MonkeyPatch.context() as patch, dg.DagsterInstance.ephemeral() as instance:
            patch.setenv("TRIPLANE_STORE", str(folder))
            patch.setenv("OMP_NUM_THREADS", "1")
            run_iterations(load_experiment(TINY), 1, instance)
        for asset in (*ONCE, *PER_ITERATION):
            key = None if asset in ONCE else "0000"
            assert read_ref(pods, "tiny", asset, key) == read_ref(alone, "tiny", asset, key), asset

    def told(self, run_id: str) -> str:
        """Log of a run and of the last pods, for a failed test."""
        lines = [entry.user_message or str(entry.dagster_event) for entry in self.instance.all_logs(run_id)][-40:]
        logs = [f"{pod['metadata']['name']}: {self.cluster.log_of(pod)[-1500:]}" for pod in self.cluster.pods()[-4:]]
        return "\n".join(line[:600] for line in lines) + "\n" + "\n".join(logs)


def _variables(folder: Path) -> dict[str, str]:
    return {
        "DAGSTER_HOME": str(folder / "dagster"),
        "TRIPLANE_STORE": str(folder / "store"),
        "TRIPLANE_EXPERIMENTS": str(ROOT / "tests" / "dagster"),
        "TRIPLANE_EXECUTOR": "k8s",
        "OMP_NUM_THREADS": "1",
    }


def _instance(folder: Path, kubeconfig: Path, settings: Mapping[str, Any]) -> Path:
    (folder / "dagster").mkdir()
    config = {
        "run_launcher": {
            "module": "triplane_dagster.run_pods",
            "class": "RunPodLauncher",
            "config": {
                "load_incluster_config": False,
                "kubeconfig_file": str(kubeconfig),
                "job_namespace": NAMESPACE,
                "job_image": "triplane:1",
                "service_account_name": "runs",
                "instance_config_map": "instance",
                "dagster_home": str(folder / "dagster"),
                "run_k8s_config": {"job_spec_config": {"backoff_limit": 0, "ttl_seconds_after_finished": 3600}},
            },
        },
        "run_monitoring": {"enabled": True, "poll_interval_seconds": 2, "max_resume_run_attempts": 0},
        "run_retries": {"enabled": True, "max_retries": 3, "retry_on_asset_or_op_failure": False},
        "telemetry": {"enabled": False},
        **settings,
    }
    (folder / "dagster" / "dagster.yaml").write_text(json.dumps(config))
    return folder / "dagster"


@contextmanager
def run_world(
    folder: Path, variables: Mapping[str, str] | None = None, settings: Mapping[str, Any] | None = None
) -> Iterator[RunWorld]:
    """Start a cluster and Dagster's daemon; end both, and every pod, afterwards.

    variables: more of the environment. settings: more of dagster.yaml.
    """
    environment = {**_variables(folder), **(variables or {})}
    with serving(Cluster(folder / "cluster", environment)) as cluster:
        home = _instance(folder, cluster.folder / "kubeconfig.json", settings or {})
        with dg.DagsterInstance.from_config(str(home)) as instance:
            world = RunWorld(folder, cluster, instance, environment)
            with (folder / "daemon.log").open("wb") as log:
                daemon = subprocess.Popen(
                    [
                        sys.executable,
                        "-W",
                        "ignore",
                        "-m",
                        "dagster._daemon",
                        "run",
                        "-m",
                        "triplane_dagster.definitions",
                    ],
                    cwd=ROOT,
                    env=world.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                yield world
            finally:
                daemon.terminate()
                try:
                    daemon.wait(30)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
