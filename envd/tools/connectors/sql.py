"""The tool `sql`: one statement on an SQLite file of the workspace."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack
from pathlib import Path
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
PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
PRAGMAS |= {"data_version", "page_size"}
"""Pragmas that a read may use; full-text and R-tree tables use the last two."""
DENIED = {sqlite3.SQLITE_DETACH, sqlite3.SQLITE_TRANSACTION, getattr(sqlite3, "SQLITE_SAVEPOINT", 32)}
"""What a read may not do, besides ATTACH and other pragmas; changes are refused by `query_only`."""


def run(arguments: Arguments) -> Answer:
    """See the schema of `sql`."""
    path, write = inside(arguments["path"]), arguments.get("write", False)
    if not write and not path.is_file():
        raise Refused(f"no such file: {arguments['path']}")
    with ExitStack() as stack:
        if not write:
            path, mode = _unchanged(path, stack)
        return _run(path, "rwc" if write else mode, write, arguments)


def _unchanged(path: Path, stack: ExitStack) -> tuple[Path, str]:
    """Path and mode for reading a database without changing its files.

    The last connection that may write moves a write-ahead log into the database when it closes.
    """
    log, index = (path.with_name(path.name + end) for end in ("-wal", "-shm"))
    if not log.exists():
        return path, "rw"  # not ro: what a journal holds of a cut-off transaction is undone first
    if index.exists():
        return path, "ro"
    copies = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # nobody has it open
    for each in (path, log):
        shutil.copyfile(each, copies / each.name)
    return copies / path.name, "rw"


def _run(path: Path, mode: str, write: bool, arguments: Arguments) -> Answer:
    database = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None)
    try:
        database.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
        if hasattr(database, "setlimit"):
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
        if not write:
            database.execute("pragma query_only=1")
        database.set_authorizer(_may_write if write else _may_read)
        steps = itertools.count()
        database.set_progress_handler(lambda: next(steps) >= STEPS, STEP)
        found = database.execute(arguments["query"], arguments.get("parameters", []))
        return _table(found, arguments.get("rows", ROWS))
    except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
        words = f"the statement took more than {STEPS * STEP} steps" if str(error) == "interrupted" else str(error)
        if not write and words in ("not authorized", "authorization denied", "attempt to write a readonly database"):
            words = "not authorized: set write to change the database"
        raise Refused(words) from None
    finally:
        database.close()


def _may_read(action: int, first: Any, second: Any, *_: Any) -> int:
    denied = action in DENIED or action == sqlite3.SQLITE_ATTACH or second in ("load_extension", "fts3_tokenizer")
    denied |= action == sqlite3.SQLITE_PRAGMA and first.lower() not in PRAGMAS
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK


def _may_write(action: int, first: Any, *_: Any) -> int:
    """All but a file outside the workspace, by ATTACH or VACUUM INTO; VACUUM attaches one without a name."""
    if action != sqlite3.SQLITE_ATTACH or first == "":
        return sqlite3.SQLITE_OK
    inside_it = first and not first.startswith("file:") and Path.cwd() in Path(first).resolve().parents
    return sqlite3.SQLITE_OK if inside_it else sqlite3.SQLITE_DENY


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
