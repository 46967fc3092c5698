"""A data pipeline of twenty stages: memory by rows, rows a second beside one DuckDB query, and overlap of waiting.

    rows/4, rows --> the pipeline, a process of its own each --> peak memory of it and its workers
    rows         --> the same work as one query of DuckDB in memory --> must give the same rows
    some rows    --> a function that computes | an endpoint that waits | both --> seconds

Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duckdb
import yaml
from pydantic import Field

from benchmarks.measure import resident
from benchmarks.result import Options, Result
from contracts.errors import TriplaneError
from contracts.store import open_store
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.rows import draw
from curation.pipeline.runner import run_pipeline
from resources.data_pipeline import load_pipeline

USERS = 5000
FUNCTIONS = """
def tidy(row):
    return {"text": " ".join(row["text"].split()).lower()}

def busy(row, rounds):
    total = row["id"]
    for number in range(rounds):
        total = (total * 1103515245 + number) % 2147483648
    return {"total": total}
"""
STAGES: list[dict[str, Any]] = [
    {"kind": "sql", "columns": {"size": "length(text)"}},
    {"kind": "where", "predicate": "size > 20"},
    {"kind": "map", "function": "work:tidy", "columns": {"text": "VARCHAR"}, "input": ["text"]},
    {"kind": "sql", "columns": {"words": "len(string_split(text, ' '))"}},
    {"kind": "where", "predicate": "words >= 3"},
    {
        "kind": "join",
        "database": {"kind": "sqlite", "path": "users.db"},
        "table": "users",
        "by": "author",
        "key": "id",
        "columns": {"country": "VARCHAR"},
    },
    {"kind": "sql", "columns": {"bucket": "id % 97"}},
    {"kind": "where", "predicate": "bucket <> 13"},
    {"kind": "sql", "columns": {"grade": "score * 0.5e0 + words"}},
    {"kind": "where", "predicate": "grade > 4"},
    {"kind": "sample", "share": 0.95, "seed": 1},
    {"kind": "sql", "columns": {"head": "left(text, 24)"}},
    {"kind": "distinct", "by": ["head", "author"]},
    {"kind": "sql", "columns": {"label": "country || '-' || bucket"}},
    {"kind": "where", "predicate": "label <> 'c0-0'"},
    {"kind": "cap", "by": ["author"], "rows": 150},
    {"kind": "sql", "columns": {"long": "size > 60"}},
    {"kind": "where", "predicate": "NOT long OR bucket < 90"},
    {"kind": "sql", "drop": ["head", "size"]},
    {"kind": "where", "predicate": "score > 0.01"},
]
PEER = f"""
WITH a AS (SELECT *, length(text) AS size, row_number() OVER () AS n FROM read_parquet('rows.parquet')),
b AS (SELECT * REPLACE (lower(regexp_replace(trim(text), '\\s+', ' ', 'g')) AS text) FROM a WHERE size > 20),
c AS (SELECT *, len(string_split(text, ' ')) AS words FROM b),
d AS (SELECT c.*, country, c.id % 97 AS bucket, score * 0.5e0 + words AS grade FROM c JOIN users ON users.id = author
      WHERE words >= 3),
e AS (SELECT *, left(text, 24) AS head FROM d WHERE bucket <> 13 AND grade > 4
      AND {draw(("id",), 1)} < {int(0.95 * 2**64)}),
f AS (SELECT *, country || '-' || bucket AS label FROM e
      QUALIFY row_number() OVER (PARTITION BY head, author ORDER BY n) = 1),
g AS (SELECT *, size > 60 AS long FROM f WHERE label <> 'c0-0'
      QUALIFY row_number() OVER (PARTITION BY author ORDER BY n) <= 150)
SELECT * EXCLUDE (head, size, n) FROM g WHERE (NOT long OR bucket < 90) AND score > 0.01 ORDER BY n
"""


class DataOptions(Options):
    """Options of the `data` benchmark."""

    rows: int = Field(1_000_000, ge=4000)
    """Rows of the larger run; the smaller one has a quarter of them."""
    requests: int = Field(1600, ge=64)
    """Rows of the measurement of overlap."""
    delay: float = Field(0.05, gt=0)
    """Seconds that the endpoint waits before it answers."""


OPTIONS = DataOptions


def run(options: DataOptions) -> Result:
    """Measure memory, rate and overlap. Raises TriplaneError if pipeline and query give different rows."""
    with tempfile.TemporaryDirectory(prefix="bench-data-") as scratch:
        small, large = (_twenty(Path(scratch) / str(rows), rows) for rows in (options.rows // 4, options.rows))
        folder = Path(scratch) / str(options.rows)
        query, expected = _query(folder)
        if large["checksum"] != expected:
            raise TriplaneError(f"data: the pipeline gives {large['checksum']}, the query {expected}: rows differ")
        waits = _overlap(Path(scratch) / "overlap", options)
    alone = max(waits["computing"], waits["waiting"])
    metrics = {
        "memory_ratio": large["peak MiB"] / small["peak MiB"],
        "rows_per_second": options.rows / large["seconds"],
        "query_rows_per_second": options.rows / query,
        "overlap_ratio": waits["both"] / alone,
    }
    rows = [
        {"work": f"twenty stages, {each['rows']:,} rows", "seconds": each["seconds"], "peak MiB": each["peak MiB"]}
        for each in (small, large)
    ]
    rows.append({"work": f"one query, {options.rows:,} rows, in memory", "seconds": query, "peak MiB": None})
    rows += [{"work": f"overlap: {name}", "seconds": seconds, "peak MiB": None} for name, seconds in waits.items()]
    return Result(
        metrics, rows, ["peak MiB: the process and all its workers; the query keeps nothing and has no resume"]
    )


def _twenty(folder: Path, rows: int) -> dict[str, Any]:
    folder.mkdir()
    with duckdb.connect() as connection:
        connection.execute(
            "COPY (SELECT range AS id, (hash(range * 7) % 5000)::BIGINT AS author, (hash(range) % 1000) / 1000.0e0 AS"
            " score, 'Row  ' || hash(range % 700000) || ' of ' || repeat('word ', (hash(range + 1) % 20)::INT) AS text"
            f" FROM range({rows})) TO '{folder / 'rows.parquet'}' (ROW_GROUP_SIZE 50000)"
        )
    with sqlite3.connect(folder / "users.db") as users:
        users.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, country TEXT)")
        users.executemany("INSERT INTO users VALUES (?, ?)", [(number, f"c{number % 11}") for number in range(USERS)])
    return _apart(folder, "twenty", STAGES, workers=len(os.sched_getaffinity(0))) | {"rows": rows}


def _apart(folder: Path, name: str, stages: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Run a pipeline in a process of its own."""
    (folder / "work.py").write_text(FUNCTIONS)
    source = {"kind": "parquet", "path": "rows.parquet"}
    values = {"name": name, "key": "id", "source": source, "stages": stages, **settings}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "benchmarks.data", str(folder / f"{name}.yaml"), str(folder / f"{name}-store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TriplaneError(f"data: pipeline {name} failed: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _query(folder: Path) -> tuple[float, list[int]]:
    """(seconds, checksum) of the same work as one query."""
    with duckdb.connect() as connection, sqlite3.connect(folder / "users.db") as users:
        begin = time.perf_counter()
        connection.execute("CREATE TABLE users(id BIGINT, country VARCHAR)")
        connection.executemany("INSERT INTO users VALUES (?, ?)", users.execute("SELECT * FROM users").fetchall())
        place = PEER.replace("rows.parquet", str(folder / "rows.parquet"))
        connection.execute(f"COPY ({place}) TO '{folder / 'query.parquet'}' (COMPRESSION zstd)")
        return time.perf_counter() - begin, _checksum([folder / "query.parquet"])


def _checksum(files: list[Path]) -> list[int]:
    with duckdb.connect() as connection:
        names = [str(path) for path in files]
        columns = "hash(id, author, score, text, words, country, bucket, grade, label, long)::HUGEINT"
        found = connection.execute(
            f"SELECT count(*), sum({columns})::VARCHAR FROM read_parquet($1)", [names]
        ).fetchall()
        return [found[0][0], int(found[0][1] or 0)]


def _overlap(folder: Path, options: DataOptions) -> dict[str, float]:
    folder.mkdir()
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT range AS id FROM range({options.requests})) TO '{folder / 'rows.parquet'}'")
    rounds = _rounds_of(options.delay / 8)
    with _slow_server(options.delay) as url:
        busy = {"kind": "map", "function": "work:busy", "columns": {"total": "BIGINT"}, "options": {"rounds": rounds}}
        endpoint = {"url": url, "concurrency": 8}
        ask = {
            "kind": "ask",
            "api": "json",
            "input": ["id"],
            "field": "answer",
            "column": "answer",
            "endpoint": endpoint,
        }
        ways = {"computing": [busy], "waiting": [ask], "both": [busy, ask]}
        return {
            name: _apart(folder, name, stages, batch_rows=16, workers=1)["seconds"] for name, stages in ways.items()
        }


def _rounds_of(seconds: float) -> int:
    """Rounds of `busy` that take so long here."""
    scope: dict[str, Any] = {}
    exec(FUNCTIONS, scope)
    begin = time.perf_counter()
    scope["busy"]({"id": 1}, 200_000)
    return int(200_000 * seconds / (time.perf_counter() - begin))


@contextmanager
def _slow_server(delay_s: float) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(delay_s)
            self.send_response(200)
            self.send_header("Content-Length", "16")
            self.end_headers()
            self.wfile.write(b'{"answer": "ok"}')

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def measure(path: Path, store: str) -> dict[str, Any]:
    """Run a pipeline in this process: seconds, and peak memory of it and its workers."""
    begin = time.perf_counter()
    plan = plan_pipeline(load_pipeline(path), path.parent)
    made = run_pipeline(plan, open_store(store))
    seconds = time.perf_counter() - begin
    workers = plan.workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak = resident("VmHWM") / 2**20 + workers / 1024
    files = [made.path(name) for name in made.names()]
    return {"seconds": seconds, "peak MiB": peak, "checksum": _checksum(files) if path.stem == "twenty" else None}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
