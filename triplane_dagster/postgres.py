"""Dagster's records in PostgreSQL, over connections that are kept for a moment instead of made for each query.

Dagster's own storage makes a connection for each query, 7 of the 8 ms of a short one, so that idle processes hold none.
Here a connection is closed once it has been idle for IDLE_S: a step that computes for minutes holds none either.
Name it in dagster.yaml:

    storage: {custom: {module: triplane_dagster.postgres, class: PostgresStorage, config: {postgres_db: ...}}}
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

from dagster_postgres import DagsterPostgresStorage
from dagster_postgres.utils import create_pg_engine, get_token_provider_from_config, pg_url_from_config
from sqlalchemy import Engine, event

from triplane_dagster.private_dagster import ConfigurableClassData

IDLE_S = 5.0
"""Seconds after its last use in which a connection is closed, or twice as many."""


class PostgresStorage(DagsterPostgresStorage):
    """Dagster's storage of runs, events and schedules; all three share the connections."""

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Any) -> PostgresStorage:
        """See DagsterPostgresStorage.from_config_value."""
        url, tokens = pg_url_from_config(config_value), get_token_provider_from_config(config_value)
        made = cls(url, config_value.get("should_autocreate_tables", True), inst_data, tokens)
        engine = create_pg_engine(
            url,
            tokens,
            isolation_level="AUTOCOMMIT",
            pool_size=2,
            max_overflow=20,
            pool_pre_ping=True,  # a connection that the server has closed meanwhile is replaced
        )
        _close_idle(engine)
        for storage in (made._run_storage, made._event_log_storage, made._schedule_storage):
            storage._engine = engine
        return made


def _close_idle(engine: Engine) -> None:
    """Close the engine's connections when they have been idle, by a thread of each process that uses it."""
    last_use, watching = [0.0], [0]
    own = weakref.ref(engine)

    def watch() -> None:
        while (watched := own()) is not None:
            if time.monotonic() - last_use[0] > IDLE_S:
                watched.dispose()
            del watched  # or the engine would live as long as this thread
            time.sleep(IDLE_S)

    @event.listens_for(engine, "checkin")
    def used(*_: Any) -> None:
        last_use[0] = time.monotonic()
        if watching[0] != os.getpid():
            watching[0] = os.getpid()
            threading.Thread(target=watch, name="idle connections", daemon=True).start()
