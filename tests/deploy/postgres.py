"""Debian's PostgreSQL as a server of its own: a cluster in a temporary folder, on a free port, gone at the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

from tests.needs import require
from tests.ports import free_port

PATIENCE_S = 120.0
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM")
"""Before a command: it is stopped when the tests are killed."""
USER, PASSWORD, DATABASE = "triplane", "not a secret: it's/local%", "dagster"


@dataclass(frozen=True)
class Postgres:
    """A running server and how to reach it."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables of deploy/compose.yaml that lead to it."""
        return {
            "POSTGRES_HOST": "127.0.0.1",
            "POSTGRES_PORT": str(self.port),
            "POSTGRES_USER": USER,
            "POSTGRES_PASSWORD": PASSWORD,
            "POSTGRES_DB": DATABASE,
        }

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query answers."""
        connection = connect(self.port, DATABASE)
        try:
            with connection.cursor() as cursor:
                cursor.execute(query)
                found: list[tuple[Any, ...]] = cursor.fetchall()
                return found
        finally:
            connection.close()


def programs() -> Path | None:
    """The folder with initdb and postgres, or None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


def connect(port: int, database: str) -> Any:
    """A connection as the user that owns the cluster."""
    return psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=PASSWORD, dbname=database)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """A cluster with the database that the stack expects.

    PostgreSQL refuses root: for root it runs as Debian's user `postgres`.
    """
    require("initdb")
    where = programs()
    assert where is not None
    folder, port = Path(tempfile.mkdtemp(prefix="triplane-postgres-")), free_port()
    (folder / "password").write_text(PASSWORD)
    if os.geteuid() == 0:
        for path in (folder, folder / "password"):
            shutil.chown(path, "postgres", "postgres")
    data = str(folder / "data")
    try:
        initialize = ["--auth=scram-sha-256", f"--username={USER}", f"--pwfile={folder}/password", "--no-sync"]
        _start([f"{where}/initdb", "-D", data, *initialize], folder).wait(PATIENCE_S)
        options = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        server = _start([f"{where}/postgres", "-D", data, *options, "-c", f"unix_socket_directories={folder}"], folder)
        try:
            _create_database(server, port, folder / "log")
            yield Postgres(port)
        finally:
            server.send_signal(signal.SIGINT)  # clients are disconnected
            server.wait(PATIENCE_S)
    finally:
        shutil.rmtree(folder)


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    owner: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    with (folder / "log").open("ab") as log:
        command = [*WITH_PARENT, *command]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **owner)


def _create_database(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = connect(port, "postgres")
            break
        except psycopg2.OperationalError:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {DATABASE}")
    connection.close()
