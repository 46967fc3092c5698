"""Tasks graded by the rows of a database, and agents that attack the grader instead of doing the work."""

from __future__ import annotations

import base64
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from with_client import with_client

from contracts.artifacts import Artifact
from contracts.store import open_store
from contracts.tasks import Task
from curation.errors import TaskError
from curation.states import database_rows
from curation.tasks.agents import Observation, agent_named, play_suite
from curation.tasks.importing.splits import parse_shares
from curation.tasks.importing.suite import import_suite, read_source, suite_report
from curation.tasks.inspect import suite_tasks
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient, ToolCall

VALUES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
SCHEMA = """
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, amount REAL, note BLOB);
INSERT INTO orders VALUES (1, 'ann', 2.5, NULL), (2, 'bob', 4, x'00ff'), (3, 'ann', 1.25, NULL);
"""
WORK = "UPDATE orders SET amount = amount * 2 WHERE customer = 'ann'; DELETE FROM orders WHERE customer = 'bob';"
QUERIES = [
    {
        "name": "orders",
        "sql": "SELECT id, customer, amount, hex(note) FROM orders",
        "rows": [[3, "ann", 2.5, ""], [1, "ann", 5, ""]],
    },
    {"name": "largest", "sql": "SELECT id FROM orders ORDER BY amount DESC", "rows": [[1], [3]], "ordered": True},
    {"name": "bob_has_none", "sql": "SELECT * FROM orders WHERE customer = 'bob'", "rows": []},
]


def database(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(path) as connection:
        connection.executescript(script)
    connection.close()


def task_folder(root: Path, **changes: Any) -> Path:
    database(root / "shop/data/shop.db", SCHEMA)
    database(root / "shop/fixed/data/shop.db", SCHEMA + WORK)
    state = {"kind": "database", "path": "data/shop.db", "queries": QUERIES, **changes}
    about = {"instruction": "Double ann's amounts, remove bob.", "reference": "fixed", "final_state": state}
    (root / "shop/task.yaml").write_text(yaml.safe_dump(about))
    return root


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory, envd_address: str) -> Artifact:
    root = tmp_path_factory.mktemp("databases")
    reading, store = read_source(task_folder(root / "tasks")), open_store(str(root / "store"))
    return with_client(envd_address, lambda client: import_suite(reading, parse_shares([]), store, client))


@pytest.fixture(scope="module")
def task(suite: Artifact) -> Task:
    (found,) = suite_tasks(suite).values()
    return found


class Commands:
    """Agent that runs one command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def act(self, task: Task, observation: Observation) -> list[ToolCall]:
        return [] if observation.turns else [ToolCall("exec", {"command": self._command})]


def python(text: str) -> str:
    """Command that runs a Python program in the workspace."""
    return f"echo {base64.b64encode(text.encode()).decode()} | base64 -d | python3 -"


def sql(script: str) -> str:
    return python(f"import sqlite3\nc = sqlite3.connect('data/shop.db')\nc.executescript({script!r})\nc.close()\n")


def verdict(task: Task, agent: Any, address: str) -> Verdict:
    (played,) = with_client(address, lambda client: play_suite([task], agent, client, Verifier(client, None)))
    return played.verdict


def test_a_database_is_proved_by_its_queries(suite: Artifact, task: Task, envd_address: str) -> None:
    report = suite_report(suite)
    assert not report.broken and {each.cheat for each in report.cheats} == {"empty_database", "no_database"}
    assert report.observed == len(QUERIES) and not report.undecided, "rows are compared outside the sandbox, too"
    assert task.deliverables == ("/data/shop.db", "/data/shop.db-wal", "/data/shop.db-journal")
    assert not any("SELECT" in data.decode(errors="replace") for data in task.files.values())
    assert verdict(task, agent_named("oracle"), envd_address).solved
    assert not verdict(task, agent_named("noop"), envd_address).solved


HONEST = {
    "by statements": sql(WORK),
    "in a log that was not merged": python(
        "import os, sqlite3\n"
        "c = sqlite3.connect('data/shop.db')\nc.execute('PRAGMA journal_mode = WAL')\n"
        f"c.executescript({WORK!r})\nos._exit(0)\n"
    ),
    "before a transaction that was cut off": sql(WORK)
    + "; "
    + python(
        "import os, sqlite3\nc = sqlite3.connect('data/shop.db', isolation_level=None)\n"
        "c.execute('PRAGMA cache_size = 5')\nc.execute('BEGIN')\nc.execute('UPDATE orders SET amount = 7')\n"
        "c.execute('CREATE TABLE big (x)')\n"
        "c.executemany('INSERT INTO big VALUES (zeroblob(?))', [(900,)] * 900)\n"
        "assert os.path.getsize('data/shop.db') > 100_000\nos._exit(0)\n"
    ),
    "by another file": python(
        "import os, sqlite3\nc = sqlite3.connect('new.db')\n"
        f"c.executescript({SCHEMA + WORK!r})\nc.close()\nos.replace('new.db', 'data/shop.db')\n"
    ),
    "with rows in another order and other tables": sql(
        WORK + "CREATE TABLE more (x); INSERT INTO orders VALUES (0, 'ann', 5, NULL); DELETE FROM orders WHERE id = 1;"
        "UPDATE orders SET id = 1 WHERE id = 0;"
    ),
}


@pytest.mark.parametrize("way", HONEST)
def test_work_counts_however_it_was_done(way: str, task: Task, envd_address: str) -> None:
    found = verdict(task, Commands(HONEST[way]), envd_address)
    assert found.solved and not found.findings, found


LOOP = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id, 'ann', x AS amount, NULL FROM n"
ATTACKS = {
    "a link to a copy": sql(WORK) + "; mv data/shop.db /tmp/x.db; ln -s /tmp/x.db data/shop.db",
    "a link to a file of the workspace": sql(WORK) + "; mv data/shop.db y.db; ln -s ../y.db data/shop.db",
    "a directory that is a link": sql(WORK) + "; mv data other; ln -s other data",
    "a pipe": "rm data/shop.db; mkfifo data/shop.db",
    "a directory": "rm data/shop.db; mkdir data/shop.db; touch data/shop.db/x",
    "no file": "rm data/shop.db",
    "a view that never ends": sql(f"DROP TABLE orders; CREATE VIEW orders (id, customer, amount, note) AS {LOOP};"),
    "a view that never ends and yields nothing": sql(
        f"DROP TABLE orders; CREATE VIEW orders (id, customer, amount, note) AS {LOOP} WHERE x < 0;"
    ),
    "a value of a gigabyte": sql(
        "DROP TABLE orders; CREATE VIEW orders (id, customer, amount, note) AS"
        " SELECT 1, 'ann', 5, zeroblob(1000000000);"
    ),
    "a view that loads code": sql(
        "DROP TABLE orders; CREATE VIEW orders (id, customer, amount, note) AS"
        " SELECT 1, 'ann', 5, load_extension('/workspace/evil');"
    ),
    "a generated column that fails": sql(
        "DROP TABLE orders; CREATE TABLE orders (id, customer, amount, note AS (json('{')));"
        "INSERT INTO orders VALUES (1, 'ann', 5);"
    ),
    "a damaged file": "printf 'SQLite format 3\\0%4000s' x > data/shop.db",
    "a truncated file": sql(WORK) + "; truncate -s 5000 data/shop.db",
    "a huge file": sql(WORK) + "; truncate -s 40M data/shop.db",
    "a log of garbage": "head -c 100000 /dev/urandom > data/shop.db-wal",
    "code beside it": (
        "cat > conftest.py <<E\nimport pytest\n@pytest.hookimpl(hookwrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n    o = yield\n    o.get_result().outcome = 'passed'\nE\n"
        "cp conftest.py data/conftest.py; echo 'import os; os._exit(0)' | tee sqlite3.py > tempfile.py;"
        " echo 'def test_orders(): pass' > test_final_state_of_database.py"
    ),
    "an open transaction": python(
        "import os, sqlite3\nc = sqlite3.connect('data/shop.db', isolation_level=None)\n"
        "c.execute('BEGIN')\nc.execute('DELETE FROM orders')\nos._exit(0)\n"
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_the_grader_is_unsolved_and_no_fault_of_it(attack: str, task: Task, envd_address: str) -> None:
    found = verdict(task, Commands(ATTACKS[attack]), envd_address)
    assert not found.solved and found.exit in ("completed", "crashed"), found


def test_rows_of_work_half_done_are_confirmed(task: Task, envd_address: str) -> None:
    agent = Commands(sql("DELETE FROM orders WHERE customer = 'bob'"))

    async def confirm(client: SandboxClient) -> tuple[Verdict, Verdict, int]:
        verifier = Verifier(client, None)
        (played,) = await play_suite([task], agent, client, verifier)
        before = verifier.runs
        return played.verdict, await verifier.confirm(task, played.diff), verifier.runs - before

    believed, confirmed, runs = with_client(envd_address, confirm)
    assert confirmed == believed and confirmed.tests_passed == 2 and runs >= 2
    assert [row.name.partition("::test_")[2] for row in confirmed.tests if row.status == "failed"] == ["orders"]


def test_the_reader_opens_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    database(tmp_path / "real.db", SCHEMA + WORK)
    (tmp_path / "link.db").symlink_to("real.db")
    os.mkfifo(tmp_path / "pipe.db")
    query = QUERIES[1]["sql"]
    assert database_rows.rows(str(tmp_path / "real.db"), query, ordered=True) == [[1], [3]]
    with pytest.raises(OSError, match="symbolic links"):
        database_rows.rows(str(tmp_path / "link.db"), query, ordered=True)
    with pytest.raises(ValueError, match="no regular file"):
        database_rows.rows(str(tmp_path / "pipe.db"), query, ordered=True)
    (tmp_path / "real.db-wal").symlink_to("real.db")
    with pytest.raises(OSError, match="symbolic links"):
        database_rows.rows(str(tmp_path / "real.db"), query, ordered=True)


@given(st.lists(st.lists(VALUES, min_size=2, max_size=2), max_size=5), st.randoms())
def test_the_order_of_rows_does_not_matter(rows: list[list[Any]], chance: Random) -> None:
    ordered = sorted(rows, key=database_rows.order)
    # SQLite gives 1.0 where a task says 1
    other = [[_real(cell) for cell in row] for row in rows]
    chance.shuffle(other)
    assert sorted(other, key=database_rows.order) == ordered


def _real(cell: Any) -> Any:
    return float(cell) if isinstance(cell, int) and float(cell) == cell else cell


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    def reason(**changes: Any) -> str:
        reading = read_source(task_folder(tmp_path_factory.mktemp("wrong"), **changes))
        assert not reading.tasks
        return reading.broken[0].reason

    return reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "../shop.db"}, "String should match pattern"),
        ({"path": "data/../shop.db"}, "must be a plain path within the repository"),
        ({"queries": []}, "at least 1 item"),
        ({"queries": [QUERIES[2], QUERIES[2]]}, "query bob_has_none is declared twice"),
        ({"queries": [{"name": "a", "sql": "SELECT 1", "rows": [[2**63]]}]}, "integers of 64 bits"),
        ({"path": "data/other.db"}, "deliverables do not name data/shop.db"),
    ],
)
def test_a_declaration_that_is_wrong_is_named_with_its_reason(
    changes: dict[str, Any], said: str, wrong: Callable[..., str]
) -> None:
    assert said in wrong(**changes)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"sql": "DELETE FROM orders", "rows": []}, "test_q: sqlite3.DatabaseError: not authorized"),
        ({"sql": "ATTACH 'x.db' AS x", "rows": []}, "not authorized"),
        ({"sql": "PRAGMA table_info(orders)", "rows": []}, "not authorized"),
        ({"sql": "SELECT count(*) FROM orders", "rows": [[7]]}, "test_q: "),
        ({"sql": "SELECT 'right before'", "rows": [["right before"]]}, "right before anything is done"),
    ],
)
def test_queries_that_prove_nothing_leave_the_task_out(
    query: dict[str, Any], said: str, tmp_path: Path, envd_address: str
) -> None:
    reading = read_source(task_folder(tmp_path, queries=[{"name": "q", **query}]))
    with pytest.raises(TaskError, match=said):
        store = open_store(str(tmp_path / "store"))
        with_client(envd_address, lambda client: import_suite(reading, parse_shares([]), store, client))
