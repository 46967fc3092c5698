"""Records in PostgreSQL take few connections, which are replaced when the server closes them and closed when idle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
import yaml

from tests.deploy.compose import ROOT
from tests.deploy.postgres import Postgres, running_postgres
from triplane_dagster import postgres as kept

OURS = "SELECT pid FROM pg_stat_activity WHERE datname = 'dagster' AND pid <> pg_backend_pid()"


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with running_postgres() as running:
        yield running


@pytest.fixture
def instance(server: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """The instance of a deployment, but for its step logs and launcher."""
    monkeypatch.setattr(kept, "IDLE_S", 0.3)
    for name, value in server.environment.items():
        monkeypatch.setenv(f"DAGSTER_{name}", value)
    production = yaml.safe_load((ROOT / "deploy" / "dagster-production.yaml").read_text())
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump({"storage": production["storage"]}))
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


@dg.job
def a_job() -> None: ...


def connections(server: Postgres) -> set[int]:
    return {int(pid) for (pid,) in server.rows(OURS)}


def write(instance: dg.DagsterInstance, run: dg.DagsterRun, count: int = 20) -> None:
    for number in range(count):
        instance.report_engine_event(f"event {number}", run)
        assert instance.get_run_by_id(run.run_id) is not None


def test_queries_share_a_connection_that_is_closed_when_idle(server: Postgres, instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(a_job)
    write(instance, run)
    first = connections(server)
    write(instance, run)
    assert connections(server) == first and 1 <= len(first) <= 2
    deadline = time.monotonic() + 30
    while connections(server):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    write(instance, run)
    assert len(list(instance.all_logs(run.run_id))) == 60


def test_a_connection_that_the_server_has_closed_is_replaced(server: Postgres, instance: dg.DagsterInstance) -> None:
    run = instance.create_run_for_job(a_job)
    for _ in range(5):
        write(instance, run, 1)
        server.rows(f"SELECT pg_terminate_backend(pid) FROM ({OURS}) AS ours")
    assert len(list(instance.all_logs(run.run_id))) == 5


def test_a_process_that_was_forked_makes_connections_of_its_own(server: Postgres, instance: dg.DagsterInstance) -> None:
    with dg.DagsterInstance.from_ref(instance.get_ref()) as again:
        run = again.create_run_for_job(a_job)
        child = os.fork()
        if child == 0:
            try:
                with dg.DagsterInstance.from_ref(instance.get_ref()) as own:
                    write(own, run, 5)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        write(again, run, 5)
        assert len(list(again.all_logs(run.run_id))) == 10
