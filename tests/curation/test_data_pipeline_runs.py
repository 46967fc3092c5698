"""Data pipelines killed, interrupted, and asking endpoints and servers."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from contracts.artifacts import Artifact, discard_artifact, find_artifact, list_artifacts
from contracts.errors import InfraFault
from contracts.leftovers import sweep_leftovers
from contracts.parts import Parts
from contracts.processes import start_of
from contracts.store import open_store
from curation.errors import PipelineError
from curation.pipeline import databases
from curation.pipeline.config import Pipeline
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.runner import run_pipeline
from tests.curation.judge_server import Reply, judge_server, said, scored
from tests.curation.pipelines import ROWS, calls, function, go, rows_of, started, values, world
from tests.deploy.postgres import DATABASE, PASSWORD, USER, connect, running_postgres


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return world(tmp_path / "pipeline")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def chat(url: str, **changes: Any) -> dict[str, Any]:
    endpoint = {"url": f"{url}/v1", "concurrency": 4, "timeout_s": 20}
    given = {"kind": "ask", "model": "m", "template": "Rate {text}", "column": "answer", "endpoint": endpoint}
    return given | changes


def stages(folder: Path, url: str) -> list[dict[str, Any]]:
    shout = {"kind": "map", "function": function(folder, "shout"), "columns": {"loud": "VARCHAR"}}
    return [
        shout,
        chat(url),
        {"kind": "distinct", "by": ["text"]},
        {"kind": "sql", "columns": {"size": "length(answer)"}},
    ]


def wait_for(reached: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "data-batch-done:4",
        "artifact-staged:2",
        "data-batch-committed:4",
        "artifact-staged",
        "before-manifest",
        "after-manifest:3",
    ],
)
def test_killed_pipeline_computes_and_asks_for_no_committed_batch_again(
    folder: Path, tmp_path: Path, point: str
) -> None:
    with judge_server(lambda path, body: said(body["messages"][0]["content"][::-1])) as server:
        given = stages(folder, server.url)
        whole = go(folder, str(tmp_path / "whole"), *given)
        (folder / "calls.txt").unlink()
        server.asked.clear()
        killed = started(folder, str(tmp_path / "store"), *given, env={"TRIPLANE_KILL_AT": point})
        assert killed.wait(60) == -signal.SIGKILL, killed.communicate()[0]
        store = open_store(str(tmp_path / "store"))
        sweep_leftovers(store)
        kept = {row for row, _ in calls(folder)}
        made = go(folder, store.url, *given)
    assert made.manifest.files == whole.manifest.files and made.meta == whole.meta
    repeated = [row for row, count in Counter(row for row, _ in calls(folder)).items() if count > 1]
    if point.startswith("data-batch"):
        in_flight = 2 + 3
        assert len(kept) > 16 and len(repeated) <= in_flight * 16 < len(ROWS)
        assert not set(repeated) & set(range(16)), "the first batch was committed long before"
    else:
        assert not repeated
    assert Counter(body["messages"][0]["content"] for body in server.asked).most_common(1)[0][1] <= 2
    assert len(server.asked) <= len(ROWS) + 4, "only requests in flight were lost"
    assert not [key for key in store.list("artifacts/") if "/parts/" in key]


def test_workers_end_with_a_killed_or_interrupted_run(folder: Path, store: str) -> None:
    with judge_server(lambda path, body: said("x")) as server:
        server.delay_s = 0.3
        for number in (signal.SIGKILL, signal.SIGINT):
            (folder / "calls.txt").unlink(missing_ok=True)
            process = started(folder, store, *stages(folder, server.url), batch_rows=7 + number)
            wait_for(lambda: calls(folder) and server.asked, process)
            workers = {pid for _, pid in calls(folder)}
            assert workers and all(start_of(pid) for pid in workers)
            process.send_signal(number)
            assert process.wait(30) != 0
            deadline = time.monotonic() + 10
            while any(start_of(pid) for pid in workers):
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_judgements_become_columns_and_unreadable_ones_are_counted(folder: Path, store: str) -> None:
    refused = threading.Event()

    def behave(path: str, body: dict[str, Any]) -> Reply:
        number = int(re.findall(r"text \d+ of (\d+)", body["messages"][1]["content"])[0])
        if number == 3 and not refused.is_set():
            refused.set()
            return 503, "busy"
        if number == 4:
            return 400, {"error": "too long"}
        return said("no JSON") if number == 5 else scored(number % 10, f"because {number}")

    with judge_server(behave) as server:
        ask = chat(server.url, answer="score", reason_column="why", structured="none")
        where = {"kind": "where", "predicate": "id < 8"}
        with pytest.raises(
            PipelineError, match=r"stages\.1 \(ask\): the row with id (4|5): .*(too long|not \{\"reason)"
        ):
            go(folder, store, where, ask)
        made = go(folder, store, where, {**ask, "on_error": "null"})
        dropped = go(folder, store, where, {**ask, "on_error": "drop"})
    assert [row["answer"] for row in rows_of(made)] == [0, 1, 2, 3, None, None, 6, 7]
    assert rows_of(made)[3]["why"] == "because 3" and refused.is_set()
    assert made.meta["stages"][2]["left_out"] == {"refused (null)": 1, "unreadable (null)": 1}
    assert [row["id"] for row in rows_of(dropped)] == [0, 1, 2, 3, 6, 7]
    assert len(server.asked) <= 8 + 1 + 2 + 4, "the busy one, twice the refused one, and those in flight at the error"
    assert "a row of a data set" in server.asked[0]["messages"][0]["content"]


def test_endpoint_of_json_gets_columns_and_gives_a_number(folder: Path, store: str) -> None:
    def behave(path: str, body: dict[str, Any]) -> Reply:
        return 200, {"length": 10**400 if body["id"] == 5 else len(body["text"]), "id": body["id"]}

    with judge_server(behave) as server:
        ask = {
            "kind": "ask",
            "api": "json",
            "input": ["id", "text"],
            "field": "length",
            "column": "n",
            "answer": "score",
        }
        made = go(folder, store, {**ask, "on_error": "null", "endpoint": {"url": f"{server.url}/measure"}})
    assert [row["n"] for row in rows_of(made)] == [None if row["id"] == 5 else len(row["text"]) for row in ROWS]
    assert made.meta["stages"][1]["left_out"] == {"unreadable (null)": 1}


@pytest.mark.slow
def test_endpoints_of_json_share_no_answers(folder: Path, store: str) -> None:
    with judge_server(lambda path, body: (200, {"score": len(path)})) as server:
        ask = {"kind": "ask", "api": "json", "input": ["text"], "field": "score", "answer": "score"}
        one, other = (
            {**ask, "column": path, "endpoint": {"url": f"{server.url}/{path}"}} for path in ("toxicity", "quality")
        )
        first = rows_of(go(folder, store, one, other))[0]
        moved = rows_of(go(folder, store, {**one, "endpoint": other["endpoint"]}, other))[0]
        model = rows_of(go(folder, store, {**one, "model": "v2"}))[0]
    assert (first["toxicity"], first["quality"]) == (9, 8) == (model["toxicity"], moved["toxicity"])
    assert len(server.asked) == 3 * len(ROWS)


@pytest.mark.slow
def test_rows_that_are_made_again_after_gc_are_selected_again(folder: Path, tmp_path: Path) -> None:
    refusing = True
    with judge_server(lambda path, body: (400, {}) if refusing and body["id"] < 16 else (200, {"n": 1})) as server:
        ask = {"kind": "ask", "api": "json", "input": ["id"], "field": "n", "column": "n", "on_error": "drop"}
        ask["endpoint"] = {"url": server.url}
        given = [ask, {"kind": "cap", "by": ["lang"], "rows": 70}]
        first = go(folder, str(tmp_path / "store"), *given)
        store = open_store(str(tmp_path / "store"))
        later = {"kind": "sql", "columns": {"one": "1"}}
        killed = started(folder, store.url, *given, later, env={"TRIPLANE_KILL_AT": "data-batch-committed:3"})
        assert killed.wait(60) == -signal.SIGKILL, killed.communicate()[0]
        refusing = False
        for rows in list_artifacts(store, "data_rows"):
            discard_artifact(store, rows.ref)
        made = go(folder, store.url, *given, later)
        whole = go(folder, str(tmp_path / "whole"), *given, later)
    assert first.meta["rows"] < whole.meta["rows"] == 70 + 70 + 40
    assert made.manifest.files == whole.manifest.files and made.meta == whole.meta


def test_a_store_where_duckdb_keeps_no_database_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"has a \? in its path: use a store"):
        go(folder, str(tmp_path / "what?" / "store"), {"kind": "distinct", "by": ["id"]})


@pytest.mark.slow
def test_unreachable_endpoint_ends_the_run_and_keeps_the_rows_before(folder: Path, store: str) -> None:
    shout = {"kind": "map", "function": function(folder, "shout"), "columns": {"loud": "VARCHAR"}}
    ask = chat("http://127.0.0.1:9", endpoint={"url": "http://127.0.0.1:9/v1", "attempts": 1}, on_error="drop")
    with pytest.raises(InfraFault, match=r"stages\.2 \(ask\): http://127\.0\.0\.1:9/v1/chat/completions failed"):
        go(folder, store, shout, {"kind": "distinct", "by": ["id"]}, ask)
    with judge_server(lambda path, body: said("x")) as server:
        go(folder, store, shout, {"kind": "distinct", "by": ["id"]}, chat(server.url, on_error="drop"))
    assert len(calls(folder)) == len(ROWS), "an endpoint's address is part of no key"


def test_run_that_joins_its_parts_adopts_the_result_of_another(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, others = Parts.names, list[Artifact]()

    def names(parts: Parts) -> list[str]:
        found = listed(parts)
        if found and not others:  # about to join them
            monkeypatch.setattr(Parts, "names", listed)
            others.append(go(folder, store, {"kind": "sql", "columns": {"n": "id + 1"}}))
        return found

    monkeypatch.setattr(Parts, "names", names)
    assert go(folder, store, {"kind": "sql", "columns": {"n": "id + 1"}}).manifest == others[0].manifest


def test_no_more_batches_are_in_flight_than_memory_is_meant_for(folder: Path, store: str) -> None:
    with judge_server(lambda path, body: said("x")) as server:
        server.delay_s = 1.0
        ask = chat(server.url, endpoint={"url": f"{server.url}/v1", "concurrency": 4096})
        process = started(folder, store, ask, batch_rows=4)
        try:
            wait_for(lambda: server.at_once, process)
            time.sleep(0.5)
            assert 4 < server.at_once <= 4 * (2 * 1 + 3)
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", ["rows.parquet", "users.db", "functions"])
def test_file_that_changes_behind_its_digest_is_noticed(folder: Path, store: str, name: str) -> None:
    path = next(folder.glob(f"{name}*"))
    odd = {"kind": "map", "function": function(folder, "odd"), "columns": {"loud": "VARCHAR"}}
    join = {
        "kind": "join",
        "database": {"kind": "sqlite", "path": "users.db"},
        "table": "users",
        "by": "user",
        "key": "id",
    }
    join |= {"columns": {"age": "BIGINT"}, "missing": "drop", "several": "first"}
    plan = plan_pipeline(Pipeline.model_validate(values({"kind": "sample", "rows": 50}, odd, join)), folder)
    os.utime(path, (1, 1))
    with pytest.raises(PipelineError, match=f"{path.name} changed while it was read"):
        run_pipeline(plan, open_store(store))
    assert find_artifact(open_store(store), "data", plan.key) is None


def test_writer_of_a_database_is_noticed_by_its_log(folder: Path, store: str) -> None:
    source = {"kind": "database", "database": {"kind": "sqlite", "path": "wal.db"}, "table": "t", "key": "id"}
    with sqlite3.connect(folder / "wal.db") as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t (id INTEGER)")
    database.close()
    plan = plan_pipeline(Pipeline.model_validate(values(source={**source, "columns": {"id": "BIGINT"}})), folder)
    with sqlite3.connect(folder / "wal.db") as writer:
        writer.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(PipelineError, match=r"wal\.db-wal changed while it was read"):
        run_pipeline(plan, open_store(store))
    writer.close()
    assert rows_of(go(folder, store, source={**source, "columns": {"id": "BIGINT"}})) == [{"id": 1}]


def test_postgresql_is_read_in_pages_and_joined(folder: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_postgres() as server:
        connection = connect(server.port, DATABASE)
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE people (id bigint PRIMARY KEY, name text, tags text[])")
            cursor.execute(
                "INSERT INTO people SELECT n, 'p' || n, ARRAY['a', n::text] FROM generate_series(0, 99) AS n"
            )
        connection.close()
        where = f"host=127.0.0.1 port={server.port} user={USER} dbname={DATABASE} password="
        quoted = PASSWORD.replace("\\", "\\\\").replace("'", "\\'")
        database = {"kind": "postgresql", "url_env": "PEOPLE_URL", "revision": "1"}
        source = {"kind": "database", "database": database, "table": "public.people", "key": "id"}
        source["columns"] = {"id": "BIGINT", "name": "VARCHAR", "tags": "VARCHAR[]"}
        join = {"kind": "join", "database": database, "table": "people", "by": "next", "key": "id"}
        join |= {"columns": {"name": "VARCHAR"}, "missing": "null"}
        given = [{"kind": "sql", "columns": {"next": "id + 1"}}, join]
        with pytest.raises(PipelineError, match=r"source: \$PEOPLE_URL is not set"):
            go(folder, store, *given, source=source)
        monkeypatch.setenv("PEOPLE_URL", f"{where}'{quoted}'")
        found: Artifact = go(folder, store, *given, source=source)
    names = [*(f"p{n + 1}" for n in range(99)), None]
    assert rows_of(found) == [{"id": n, "name": names[n], "tags": ["a", str(n)], "next": n + 1} for n in range(100)]
    assert go(folder, store, *given, source=source).ref == found.ref, "a found result needs no server"


def test_postgresql_source_is_one_snapshot_without_null_keys(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_postgres() as server:
        connection = connect(server.port, DATABASE)
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE t (id bigint PRIMARY KEY, v bigint)")
        cursor.execute("INSERT INTO t SELECT n, 0 FROM generate_series(0, 9) AS n")
        cursor.execute("CREATE VIEW nulls AS SELECT CASE WHEN id < 8 THEN id END AS id, v FROM t")
        quoted = PASSWORD.replace("\\", "\\\\").replace("'", "\\'")
        where = f"host=127.0.0.1 port={server.port} user={USER} dbname={DATABASE} password='{quoted}'"
        monkeypatch.setenv("T_URL", where)
        source = {"kind": "database", "database": {"kind": "postgresql", "url_env": "T_URL", "revision": "1"}}
        source |= {"table": "t", "key": "id", "columns": {"id": "BIGINT", "v": "BIGINT"}}
        pages = plan_pipeline(Pipeline.model_validate(values(source=source, batch_rows=4)), folder).reader.batches(None)
        first = next(pages)
        cursor.execute("UPDATE t SET v = 1")
        assert next(pages).table.column("v").to_pylist() == [0] * 4
        cursor.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in%'")
        with pytest.raises(InfraFault, match=r"source: the connection broke .* run the same command again"):
            next(pages)
        with pytest.raises(PipelineError, match=r"source\.key = 'id': it has nulls"):
            go(folder, store, source={**source, "table": "nulls"}, batch_rows=4)
        connection.close()
    assert first.cursor == 3


@pytest.mark.parametrize(
    "url",
    [
        "postgress://me:s3cret@127.0.0.1/x",
        "postgresql://me:s3@cret@127.0.0.1:1/x",
        "postgresql://me:s3cret@127.0.0.1:1/x?sslmod=require",
        "me:s3cret@db",
        "postgresql://me:5/cret@127.0.0.1:54a/x",
    ],
)
def test_errors_of_a_connection_never_show_its_password(
    folder: Path, store: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "ATTEMPTS", 1)
    monkeypatch.setenv("SECRET_URL", url)
    source = {"kind": "database", "database": {"kind": "postgresql", "url_env": "SECRET_URL", "revision": "1"}}
    with pytest.raises((InfraFault, PipelineError), match=r"source: .*\$SECRET_URL.*correct") as caught:
        go(folder, store, source={**source, "table": "t", "key": "id", "columns": {"id": "BIGINT"}})
    assert "cret" not in str(caught.value).replace("$SECRET_URL", "")
