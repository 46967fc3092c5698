"""Grade the rows of an SQLite file: the declared queries become hidden tests, which verdicts treat as any others.

    path, queries with rows  ->  test file, test names, deliverables  ->  Verifier: runs, decoys, observations

Only the database file and SQLite's logs beside it leave the agent's sandbox, as regular files; the verifier's sandbox
opens a copy for reading (curation/states/database_rows.py).
"""

from __future__ import annotations

from pathlib import Path

from contracts.final_states import DatabaseState, Query
from curation.states import database_rows
from curation.tasks.importing.trees import Tree, tree_patch

TEST_FILE = "test_final_state_of_database.py"
"""Name of the hidden test file, at the root of the repository."""


def database_tests(state: DatabaseState) -> tuple[str, ...]:
    """Node ids of the hidden tests, one a query, in their order."""
    return tuple(f"{TEST_FILE}::test_{query.name}" for query in state.queries)


def database_test_file(state: DatabaseState) -> bytes:
    """Hidden test file: each test compares the rows of its query with a literal."""
    head = Path(database_rows.__file__).read_text(encoding="utf-8")
    return (head + "".join(_test(state.path, query) for query in state.queries)).encode()


def database_deliverables(state: DatabaseState) -> tuple[str, ...]:
    """Patterns of the files that leave the agent's sandbox."""
    return tuple(f"/{state.path}{suffix}" for suffix in ("", *database_rows.LOGS))


def database_cheats(state: DatabaseState, files: Tree) -> dict[str, bytes]:
    """Final states, by name, that try to pass without the work: an empty database, and none."""
    before = {path: data for path, data in files.items() if path == state.path}
    return {
        "empty_database": tree_patch(before, {state.path: b""}),
        **({"no_database": tree_patch(before, {})} if before else {}),
    }


def _test(path: str, query: Query) -> str:
    expected = [list(row) for row in query.rows]
    if not query.ordered:
        expected.sort(key=database_rows.order)
    call = f"rows({path!r}, {query.sql!r}, ordered={query.ordered})"
    return f"\n\ndef test_{query.name}():\n    assert {call} == {expected!r}\n"
