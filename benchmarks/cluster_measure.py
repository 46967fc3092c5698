"""Measure what one iteration asks of the shared parts of a cluster.

moto, PostgreSQL, stand-in API server, Dagster's daemon
    iterations in this process, of other sizes       S3 requests of a group, of an episode, of the rest
    one iteration in pods, its trainer a Job         API calls, event rows, PostgreSQL sessions and bytes
    a training that sleeps                           calls of a minute of waiting
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import dagster as dg
import psycopg2

from benchmarks.cluster_costs import ApiCosts, Costs, PostgresCosts, S3Costs
from benchmarks.s3requests import traffic_of
from benchmarks.s3server import Request, S3Server, s3_server
from contracts.store import open_store
from ops.iteration_keys import iteration_key
from resources.channel import PIPES_BUCKET
from resources.experiment import load_experiment
from resources.kubernetes.settings import IMAGE
from resources.launch import Launch
from tests.deploy.postgres import DATABASE, PASSWORD, USER, Postgres, running_postgres
from tests.kubernetes.api_server import Cluster, serving
from tests.kubernetes.run_world import ROOT, RunWorld, run_world
from tests.kubernetes.trainings import launch_as_job
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.run import open_runner

TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
GROUPS, GROUP_SIZE = 4, 4
SIZES = ((GROUPS, GROUP_SIZE), (GROUPS, GROUP_SIZE), (4 * GROUPS, GROUP_SIZE), (GROUPS, 3 * GROUP_SIZE))
"""Groups and episodes of a group of iterations 0000 to 0003. The first one warms up."""
YOUNG_S, WAIT_S = 60.0, 120.0
"""Seconds after which a driver polls less often, and how long the training sleeps."""
START_S, IDLE_S, MANY = 25.0, 30.0, 4
"""Seconds in which the daemon starts, and of watching it without a run; experiments of the larger deployment."""
INSERT_S, WRITERS = 5.0, 4
_STORE, _LOGS, _PIPES = "triplane", "logs", "pipes"


class TimedCalls(list[tuple[str, str]]):
    """Requests of an API server, with their times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, call: tuple[str, str]) -> None:
        """See list.append."""
        super().append(call)
        self.times.append(time.monotonic())

    def of(self, method: str, ending: str) -> list[float]:
        """Times of some requests."""
        both = zip(list(self), list(self.times), strict=False)
        return [at for (verb, path), at in both if verb == method and path.endswith(ending)]

    def between(self, begin: float, end: float) -> list[tuple[str, str]]:
        """Requests of a period."""
        return [call for call, at in zip(list(self), list(self.times), strict=False) if begin <= at < end]


def measure() -> Costs:
    """Run all measurements: about 8 minutes. Raises ConfigError if moto is missing."""
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as scratch, quiet_dagster():
        folder = Path(scratch)
        with s3_server(folder) as server, _environment(server, folder):
            for bucket in (_STORE, _LOGS, _PIPES):
                boto3.client("s3").create_bucket(Bucket=bucket)
            waiting, polled = _waiting_training(folder / "waiting", server)
            traffic = _iterations(folder, server)
            with running_postgres() as postgres:
                api, records = _pods(folder / "pods", server, postgres, len(SIZES))
        return Costs(
            ApiCosts(trainer_minute=waiting, **api),
            PostgresCosts(**records),
            _s3_costs(traffic, polled),
            "measured in one go",
        )


def _iterations(folder: Path, server: S3Server) -> list[list[Request]]:
    """S3 requests of each iteration of SIZES, after the base assets."""
    found = []
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        for number, (groups, size) in enumerate(SIZES):
            experiment = load_experiment(TINY, [f"prompts.groups={groups}", f"rollouts.group_size={size}"])
            with open_runner(experiment, instance) as runner:
                if number == 0:
                    runner.base()
                server.taken()
                runner.iteration(iteration_key(number))
                found.append(server.taken())
    return found


def _s3_costs(traffic: Sequence[Sequence[Request]], polled: float) -> S3Costs:
    """Costs of a group, an episode and the rest, from the iterations of SIZES."""
    return S3Costs.fitted([(size, traffic_of(each).verbs) for size, each in zip(SIZES, traffic, strict=True)], polled)


def _waiting_training(folder: Path, server: S3Server) -> tuple[tuple[float, float], float]:
    """API calls a minute of the driver of a training in its first minute and later, and its S3 requests a minute."""
    with serving(Cluster(folder)) as cluster:
        calls = TimedCalls()
        cluster.requests = calls
        launch = Launch(
            ["sleep", str(WAIT_S)],
            timeout_s=2 * WAIT_S,
            key="f" * 64,
            experiment="tiny",
            store=open_store(f"s3://{_STORE}/waiting"),
        )
        server.taken()
        begin = time.monotonic()
        launch_as_job(launch, poll_s=1.0)
        wall = time.monotonic() - begin
        asked = sum(each.verb == "GET" and each.key.startswith(_PIPES) for each in server.taken())
        young = len(calls.between(begin + 10, begin + YOUNG_S - 5)) * 60 / (YOUNG_S - 15)
        old = len(calls.between(begin + YOUNG_S + 5, begin + WAIT_S - 5)) * 60 / (WAIT_S - YOUNG_S - 10)
        return (young, old), asked * 60 / wall


def _pods(folder: Path, server: S3Server, postgres: Postgres, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """API calls and records of one iteration whose run, steps and trainer are pods."""
    few, many = (_idle_sessions(folder.with_name(f"idle-{count}"), postgres, count) for count in (1, MANY))
    folder.mkdir()
    environment = {
        **{name: os.environ[name] for name in (*server.environment, "TRIPLANE_STORE", "TRIPLANE_CACHE", PIPES_BUCKET)},
        "TRIPLANE_LAUNCHER": "kubernetes",
        IMAGE: "triplane:1",
        "KUBECONFIG": str(folder / "cluster" / "kubeconfig.json"),
    }
    with run_world(folder, environment, _instance_settings(postgres)) as world:
        world.cluster.requests = calls = TimedCalls()
        world.instance.add_dynamic_partitions("tiny", [iteration_key(number)])
        time.sleep(START_S)
        with _Records(postgres) as records:
            before, begun = records.totals(), time.monotonic()
            run = world.launch("tiny_iteration", iteration_key(number))
            world.wait_for(run)
            seconds, after = time.monotonic() - begun, records.totals()
            steps, rows = _steps(world, run)
            costs = {
                "idle_sessions_minute": (few * MANY - many) / (MANY - 1),
                "experiment_sessions_minute": (many - few) / (MANY - 1),
                "poll_sessions": records.sessions_of(lambda: world.instance.get_records_for_run(run, limit=1)),
                "rows_run": rows[""],
                "rows_step": (sum(rows.values()) - rows[""]) / len(steps),
                "bytes_row": records.bytes_of_rows(),
                "sessions": after["sessions"] - before["sessions"],
                "run_seconds": seconds,
                "steps": len(steps),
                "steps_shard": sum("[" in step for step in steps) / load_experiment(TINY).prompts.workers,
                "peak_connections": records.peak,
                "inserts_s": _inserts(world.instance, run),
                "connects_s": _connects(postgres),
            }
            asked = calls.between(begun, begun + seconds)
            launched = calls.of("POST", "jobs")
    named = by_source(asked)
    api = {
        "polls_step": named["step poll"] / (sum(steps.values()) / 60),
        "polls_run": named["run poll"] / (seconds / 60),
        "orphans": named["orphans"] / (seconds / 60),
        "launch_seconds": min(after - before for before, after in pairwise(launched)),
        "named": dict(by_resource(asked)),
    }
    return api, costs


def _idle_sessions(folder: Path, postgres: Postgres, experiments: int) -> float:
    """Sessions a minute of a daemon with this many experiments, of which none runs."""
    (folder / "experiments").mkdir(parents=True)
    for number in range(experiments):
        text = TINY.read_text().replace("name: tiny", f"name: tiny{number}", 1)
        (folder / "experiments" / f"tiny{number}.yaml").write_text(text)
    (folder / "dagster.yaml").write_text(json.dumps({**_instance_settings(postgres), "telemetry": {"enabled": False}}))
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(folder),
        "TRIPLANE_EXPERIMENTS": str(folder / "experiments"),
        "TRIPLANE_LAUNCHER": "kubernetes",
    }
    command = [sys.executable, "-W", "ignore", "-m", "dagster._daemon", "run", "-m", "triplane_dagster.definitions"]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        time.sleep(START_S)
        with _Records(postgres) as records:
            return records.sessions_in(IDLE_S)
    finally:
        daemon.terminate()
        daemon.wait(60)


def _steps(world: RunWorld, run: str) -> tuple[dict[str, float], Counter[str]]:
    """Seconds of each step from its launch to its end, and rows of the event log by step ("": of the run)."""
    launched = {dg.DagsterEventType.STEP_WORKER_STARTING, dg.DagsterEventType.STEP_SUCCESS}
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    rows: Counter[str] = Counter()
    for entry in world.instance.all_logs(run):
        rows[entry.step_key or ""] += 1
        if entry.step_key and entry.is_dagster_event and entry.dagster_event_type in launched:
            begun.setdefault(entry.step_key, entry.timestamp)
            ended[entry.step_key] = entry.timestamp
    return {step: ended[step] - begun[step] for step in begun}, rows


def by_source(calls: Sequence[tuple[str, str]]) -> Counter[str]:
    """API calls by who makes them: names of Jobs tell. A Job is created by a run's daemon, a step's run or a driver."""
    found: Counter[str] = Counter()
    for method, path in calls:
        plural, _, name = path.partition("/namespaces/")[2].partition("/")[2].partition("/")
        if name.startswith("dagster-step"):
            found["step poll"] += 1
        elif name.startswith("dagster-run"):
            found["run poll"] += 1
        elif (method, plural, name) == ("POST", "jobs", ""):
            found["create"] += 1
        elif (method, plural, name) == ("GET", "jobs", ""):
            found["orphans"] += 1
        else:
            found["train"] += 1
    return found


def by_resource(calls: Sequence[tuple[str, str]]) -> Counter[str]:
    """API calls by verb and resource, in the words of RBAC."""
    found: Counter[str] = Counter()
    for method, path in calls:
        plural, *rest = path.partition("/namespaces/")[2].partition("/")[2].split("/")
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "get" if rest else "list")
        found[f"{verb} {'/'.join((plural, *rest[1:]))}"] += 1
    return found


class _Records:
    """One connection to PostgreSQL that reads its statistics."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self.peak = 0

    def __enter__(self) -> _Records:
        self._connection = self._open()
        self._sampling, self._done = self._open(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._connection.close()
        self._sampling.close()

    def _open(self) -> Any:
        made = psycopg2.connect(
            host="127.0.0.1", port=self._postgres.port, user=USER, password=PASSWORD, dbname=DATABASE
        )
        made.autocommit = True
        return made

    def _ask(self, query: str) -> Any:
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchone()

    def _sample(self) -> None:
        while not self._done.wait(0.1):
            with self._sampling.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
                self.peak = max(self.peak, cursor.fetchone()[0] - 2)

    def totals(self) -> dict[str, float]:
        """Sessions, transactions and bytes so far."""
        time.sleep(1.5)  # statistics are a second late
        row = self._ask(
            "SELECT sessions, xact_commit, tup_inserted, pg_database_size(datname) FROM pg_stat_database"
            " WHERE datname = current_database()"
        )
        return dict(zip(("sessions", "commits", "inserted", "bytes"), map(float, row), strict=True))

    def sessions_in(self, seconds: float) -> float:
        """Sessions a minute while nothing but the daemon works."""
        before = self.totals()["sessions"]
        begin = time.monotonic()
        time.sleep(seconds)
        return (self.totals()["sessions"] - before) * 60 / (time.monotonic() - begin)

    def sessions_of(self, work: Any, times: int = 20) -> float:
        """Sessions that a call opens, without those of the daemon (at most a few)."""
        before = self.totals()["sessions"]
        for _ in range(times):
            work()
        return float(self.totals()["sessions"] - before) / times

    def bytes_of_rows(self) -> float:
        """Bytes of a row of the event log, with its indexes."""
        size, rows = self._ask("SELECT pg_total_relation_size('event_logs'), count(*) FROM event_logs")
        found: float = float(size) / max(1, int(rows))
        return found


def _inserts(instance: dg.DagsterInstance, run_id: str) -> float:
    """Events a second that WRITERS threads store."""
    run = instance.get_run_by_id(run_id)
    assert run is not None
    stored, end = [0] * WRITERS, time.monotonic() + INSERT_S

    def store(writer: int) -> None:
        while time.monotonic() < end:
            instance.report_engine_event("measured", run)
            stored[writer] += 1

    threads = [threading.Thread(target=store, args=(each,)) for each in range(WRITERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return sum(stored) / INSERT_S


def _connects(postgres: Postgres) -> float:
    """Sessions a second that one client opens and closes, with a query in each."""
    opened, end = 0, time.monotonic() + INSERT_S
    while time.monotonic() < end:
        postgres.rows("SELECT 1")
        opened += 1
    return opened / INSERT_S


def _instance_settings(postgres: Postgres) -> dict[str, Any]:
    """Storage and step logs as in deploy/dagster-production.yaml."""
    database = {
        "scheme": "postgresql+psycopg2",
        "hostname": "127.0.0.1",
        "port": postgres.port,
        "username": USER,
        "password": PASSWORD,
        "db_name": DATABASE,
    }
    logs = {"bucket": _LOGS, "prefix": "dagster", "skip_empty_files": True, "upload_interval": 30}
    return {
        "storage": {"postgres": {"postgres_db": database}},
        "compute_logs": {
            "module": "dagster_aws.s3.compute_log_manager",
            "class": "S3ComputeLogManager",
            "config": logs,
        },
        "run_monitoring": {"enabled": True, "poll_interval_seconds": 20, "max_resume_run_attempts": 0},
    }


@contextmanager
def _environment(server: S3Server, folder: Path) -> Iterator[None]:
    before: Mapping[str, str] = dict(os.environ)
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)
    os.environ |= {
        **server.environment,
        "TRIPLANE_CACHE": str(folder / "cache"),
        "TRIPLANE_STORE": f"s3://{_STORE}/store",
        PIPES_BUCKET: _PIPES,
        IMAGE: "triplane:1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
