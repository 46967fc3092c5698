"""The tool `sql`: one statement on an SQLite file of the workspace."""

from __future__ import annotations

import itertools
import sqlite3
from typing import Any
from urllib.parse import quote

from envd.tools.connectors.answers import Answer, Arguments, Refused, inside

STEPS, STEP = 20_000, 1000
"""A statement ends after so many times STEP instructions of SQLite's machine."""
VALUE_BYTES = 1 << 20
CELL = 2000
"""Characters shown of a value."""
ROWS = 100
"""Rows shown by default."""
READS = {getattr(sqlite3, f"SQLITE_{name}", None) for name in ("SELECT", "READ", "FUNCTION", "RECURSIVE")} - {None}
PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list"}


def run(arguments: Arguments) -> Answer:
    """See the schema of `sql`."""
    path, write = inside(arguments["path"]), arguments.get("write", False)
    if not write and not path.is_file():
        raise Refused(f"no such file: {arguments['path']}")
    mode = "rwc" if write else "rw"  # not ro: what a journal holds of a cut-off transaction is undone first
    database = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None)
    try:
        database.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        if hasattr(database, "setlimit"):
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        if not write:
            database.set_authorizer(_may_read)
        steps = itertools.count()
        database.set_progress_handler(lambda: next(steps) >= STEPS, STEP)
        found = database.execute(arguments["query"], arguments.get("parameters", []))
        return _table(found, arguments.get("rows", ROWS))
    except (sqlite3.Error, sqlite3.Warning) as error:
        words = f"the statement took more than {STEPS * STEP} steps" if str(error) == "interrupted" else str(error)
        if not write and words == "not authorized":
            words += ": set write to change the database"
        raise Refused(words) from None
    finally:
        database.close()


def _may_read(action: int, first: Any, second: Any, *_: Any) -> int:
    allowed = action in READS or (action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS)
    return sqlite3.SQLITE_OK if allowed and second not in ("load_extension", "fts3_tokenizer") else sqlite3.SQLITE_DENY


def _table(found: sqlite3.Cursor, most: int) -> Answer:
    if found.description is None:
        return Answer(f"ok, {found.rowcount} rows changed" if found.rowcount >= 0 else "ok")
    table = Answer(" | ".join(each[0] for each in found.description) + "\n")
    count = 0
    for row in itertools.islice(found, most):
        count += 1
        table.feed((" | ".join(map(_cell, row)) + "\n").encode("utf-8", "replace"))
    more = found.fetchone() is not None
    table.note = f"first {count} rows; there are more" if more else f"{count} rows"
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value).replace("\n", "\\n")
    return text if len(text) <= CELL else f"{text[:CELL]}... ({len(text)} characters)"
