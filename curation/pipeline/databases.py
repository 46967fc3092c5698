"""Connections to databases, over Python's DB-API, read-only."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb

from contracts.digests import digest_of, file_sha256
from contracts.errors import InfraFault
from contracts.retries import backoff_s
from curation.errors import PipelineError, one_line
from curation.pipeline.config import Database, DuckdbDatabase, PostgresqlDatabase, SqliteDatabase

ATTEMPTS = 4
"""Attempts of a query to a server that can't be reached."""


def quoted(database: Database, name: str) -> str:
    """Name of a column or table in SQL."""
    # SQLite takes an unknown name in double quotes for a text
    left, right = "[]" if isinstance(database, SqliteDatabase) else '""'
    return ".".join(f"{left}{part}{right}" for part in name.split("."))


def database_files(database: Database, folder: Path) -> list[Path]:
    """Files that hold a database: the database itself, and the log of its writers, which may be empty or absent."""
    if isinstance(database, PostgresqlDatabase):
        return []
    path = folder / database.path
    return [path, path.with_name(f"{path.name}{'-' if isinstance(database, SqliteDatabase) else '.'}wal")]


def database_digest(database: Database, folder: Path) -> str:
    """Digest of a database's content, or of the revision of a server's. Raises OSError."""
    if isinstance(database, PostgresqlDatabase):
        return digest_of(["postgresql", database.revision])
    path, log = database_files(database, folder)
    logs = [log] if log.is_file() and log.stat().st_size else []
    return digest_of([file_sha256(each) for each in (path, *logs)])


class Connection:
    """One connection, for use by one thread at a time. place: of the settings, for errors. one_snapshot: a connection
    that breaks after a query is not opened again, since the next one would see another snapshot.
    """

    def __init__(self, database: Database, folder: Path, place: str, one_snapshot: bool = False) -> None:
        self._database, self._folder, self._place = database, folder, place
        self._one_snapshot, self._began = one_snapshot, False
        self._mark = "%s" if isinstance(database, PostgresqlDatabase) else "?"
        self._open: Any = None

    def query(self, sql: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Rows of a query, whose parameters are written `?`. Raises PipelineError, or InfraFault if the server can't be
        reached.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if self._open is None:
                    self._open = self._connect()
                cursor = self._open.cursor()
                cursor.execute(sql.replace("?", self._mark), list(parameters))
                rows: list[tuple[Any, ...]] = cursor.fetchall()
                self._began = True
                return rows
            except (sqlite3.Error, duckdb.Error, OverflowError) as error:
                raise PipelineError(f"{self._place}: {one_line(error)}: correct table, key and columns") from None
            except Exception as error:
                if type(error).__module__.partition(".")[0] != "psycopg2":
                    raise
                self._fail(error, last=attempt == ATTEMPTS)
                self.close()
                time.sleep(backoff_s(attempt, 0.5))
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Close the connection; the next query opens another one."""
        with suppress(Exception):
            self._open.close()
        self._open = None

    def _fail(self, error: Exception, last: bool) -> None:
        """Raise the error of a server's query, unless another attempt may succeed."""
        connected = self._open is not None
        kinds = {each.__name__ for each in type(error).__mro__}
        if kinds.isdisjoint({"OperationalError", "InterfaceError"}) and not (connected and self._open.closed):
            if connected:
                raise PipelineError(f"{self._place}: {one_line(error)}: correct table, key and columns") from None
            raise PipelineError(
                f"{self._place}: ${self._variable} is no URL or connection string of PostgreSQL: correct it"
            ) from None
        if self._one_snapshot and self._began:
            raise InfraFault(
                f"{self._place}: the connection broke ({one_line(error)}), and with it the snapshot of the rows read"
                " before: run the same command again"
            ) from None
        if last:
            # what the library says of a failed connection may quote the URL with its password
            said = f" ({one_line(error)})" if connected else ""
            raise InfraFault(
                f"{self._place}: the database of ${self._variable} can't be reached{said}: start it, or correct host,"
                " port, user, password and database there, then run the same command again"
            ) from None

    @property
    def _variable(self) -> str:
        return self._database.url_env if isinstance(self._database, PostgresqlDatabase) else ""

    def _connect(self) -> Any:
        if isinstance(self._database, SqliteDatabase):
            uri = (self._folder / self._database.path).absolute().as_uri()
            return sqlite3.connect(f"{uri}?mode=ro", uri=True, check_same_thread=False)
        if isinstance(self._database, DuckdbDatabase):
            return duckdb.connect(str(self._folder / self._database.path), read_only=True, config={"threads": 1})
        url = os.environ.get(self._variable, "").strip()
        if not url:
            raise PipelineError(f"{self._place}: ${self._variable} is not set: export the database's URL")
        try:
            import psycopg2
        except ImportError:
            raise PipelineError(f"{self._place}: PostgreSQL needs psycopg2: pip install 'triplane[postgres]'") from None
        connection = psycopg2.connect(url, connect_timeout=10)
        # one snapshot for all pages of a source
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        return connection
