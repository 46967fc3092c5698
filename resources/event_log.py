"""Keep Dagster's SQLite event log open during a run.

Dagster opens and closes a connection for each event. If that connection is the only one, closing it copies SQLite's
write-ahead log into the database and deletes it: several more fsyncs an event, a few seconds an iteration. Commits stay
as durable as before.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import dagster as dg

_INDEX = "index"
"""Database with the events of assets of all runs; each run has another one with all its events."""


@contextmanager
def event_log_kept_open(instance: dg.DagsterInstance | None, run_id: str | None) -> Iterator[None]:
    """Keep a connection to the databases that the events of a run go to, if they are SQLite files."""
    path_of = getattr(instance.event_log_storage, "path_for_shard", None) if instance is not None else None
    with ExitStack() as kept:
        for shard in (run_id, _INDEX):
            if path_of is not None and shard is not None and Path(path_of(shard)).is_file():
                with suppress(sqlite3.Error):  # the run needs no connection of ours
                    log = kept.enter_context(closing(sqlite3.connect(path_of(shard), check_same_thread=False)))
                    log.execute("SELECT count(*) FROM sqlite_master").fetchone()  # a connection that has read is open
        yield
