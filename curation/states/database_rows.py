"""Rows of queries in an SQLite file that an agent left.

This module is the head of hidden test files, so it runs in the verifier's sandbox. The file is hostile: it may be no
regular file, damaged, huge, or hold views that never end.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_ROWS, VALUE_BYTES = 1 << 26, 10_000, 1 << 20
"""Bounds of the file, of the rows of a query, and of a value, which is also the longest statement."""
LOGS = ("-wal", "-journal")
"""Ends of the names of the files beside a database that hold what was committed, or was not."""
STEP, MOST_STEPS = 1000, 20_000
"""Instructions of SQLite's machine between two counts, and counts after which a query is stopped: about a second."""
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
REFUSED = frozenset({"load_extension", "fts3_tokenizer"})
"""Functions that do more than compute."""


def content(path: str) -> bytes:
    """Bytes of a regular file."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("the database is no regular file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"the database is larger than {MOST_BYTES} bytes")
    return data


def may(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    """Whether SQLite may do this: an authorizer."""
    allowed = second not in REFUSED if action == sqlite3.SQLITE_FUNCTION else action in ALLOWED
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def order(row: list[Any]) -> list[tuple[bool, bool, str]]:
    """Key by which rows are sorted; equal values, such as 1 and 1.0, have equal keys."""
    return [(value is not None, isinstance(value, str), text_of(value)) for value in row]


def text_of(value: Any) -> str:
    """Text of a value, the same for equal ones."""
    if value is None or isinstance(value, str) or float(value) != value:
        return repr(value)
    return repr(float(value) + 0.0)  # -0.0 equals 0.0


def rows(path: str, query: str, *, ordered: bool) -> list[list[Any]]:
    """Rows of a query, sorted unless their order counts. Blobs are texts of hexadecimal digits."""
    counts = iter(range(MOST_STEPS))
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy.db")
        copy.write_bytes(content(path))
        for suffix in LOGS:
            if os.path.lexists(path + suffix):
                Path(place, f"copy.db{suffix}").write_bytes(content(path + suffix))
        # not mode=ro: what a journal holds of a transaction that was cut off is undone first, in the copy
        database = sqlite3.connect(f"{copy.as_uri()}?mode=rw", uri=True)
        try:
            database.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
            database.execute("PRAGMA trusted_schema = OFF")
            database.set_authorizer(may)
            database.set_progress_handler(lambda: next(counts, None) is None, STEP)
            found = database.execute(query).fetchmany(MOST_ROWS + 1)
        finally:
            database.close()
    if len(found) > MOST_ROWS:
        raise ValueError(f"the query gives more than {MOST_ROWS} rows")
    values = [[value.hex() if isinstance(value, bytes) else value for value in row] for row in found]
    return values if ordered else sorted(values, key=order)
