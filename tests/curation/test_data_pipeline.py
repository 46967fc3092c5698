"""Data pipelines: rows, counts, determinism, reuse, and errors."""

from __future__ import annotations

import bz2
import collections
import datetime
import gzip
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from contracts.artifacts import artifact_kinds
from contracts.errors import ConfigError
from contracts.store import open_store
from contracts.yaml_text import load_yaml
from curation.errors import PipelineError
from curation.pipeline.config import DistinctStage, Near, Pipeline
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.rows import Step
from curation.pipeline.schemas import UNFIT, array_of, schema_of
from curation.pipeline.selections import Selection, keys_of
from curation.pipeline.sources import Reader, open_source
from curation.pipeline.versions import find_version, record_version, versions
from resources.data_pipeline import load_pipeline
from tests.curation.pipelines import ROOT, ROWS, calls, function, go, rows_of, values, world

JOIN = {"kind": "join", "database": {"kind": "sqlite", "path": "users.db"}, "table": "users", "by": "user", "key": "id"}


def sql(expression: str) -> list[dict[str, Any]]:
    return [{"kind": "sql", "columns": {"n": expression}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return world(tmp_path / "pipeline")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def ids(*arguments: Any, **settings: Any) -> list[int]:
    return [row["id"] for row in rows_of(go(*arguments, **settings))]


def test_rows_pass_the_stages_in_order_and_are_counted(folder: Path, store: str) -> None:
    made = go(
        folder,
        store,
        {"kind": "where", "predicate": "lang <> 'c'"},
        {"kind": "sql", "columns": {"size": "length(text)", "half": "id * 0.5"}, "drop": ["lang"]},
        {**JOIN, "columns": {"name": "VARCHAR", "age": "INTEGER"}, "missing": "drop", "several": "first"},
        {
            "kind": "map",
            "function": function(folder, "shout"),
            "columns": {"loud": "VARCHAR"},
            "options": {"mark": "?"},
        },
        {"kind": "distinct", "by": ["name", "size"]},
        {"kind": "map", "function": function(folder, "odd"), "columns": {"loud": "VARCHAR"}, "input": ["id"]},
        {"kind": "map", "function": function(folder, "twice"), "columns": {"part": "BIGINT"}},
        workers=2,
    )
    names = {0: ("Ada", 30), 1: ("Bo", 31), 2: ("Cy", 32), 3: ("Dan", 34)}
    expected, seen = [], set()
    for row in ROWS:
        if row["lang"] == "c" or row["user"] not in names:
            continue
        name, age = names[row["user"]]
        if (name, len(row["text"])) in seen:
            continue
        seen.add((name, len(row["text"])))
        for part in (0, 1) if row["id"] % 2 else ():
            own = {"id": row["id"], "text": row["text"], "user": row["user"], "size": len(row["text"])}
            expected.append(own | {"half": row["id"] * 0.5, "name": name, "age": age, "loud": "x", "part": part})
    found = [{**row, "half": float(row["half"])} for row in rows_of(made)]
    assert found == expected
    where = made.meta["stages"][1]
    assert where == {"stage": "where", "in": 200, "out": 160, "left_out": {"false": 40}}
    assert [each["out"] for each in made.meta["stages"][:-1]] == [each["in"] for each in made.meta["stages"][1:]]
    assert made.meta["rows"] == len(expected)
    assert made.meta["stages"][-2]["left_out"]["none"] == len(seen) - len(expected) // 2
    paths = [str(made.path(name)) for name in made.names()]
    assert ds.dataset(paths).to_table().num_rows == len(expected)
    assert duckdb.sql(f"SELECT count(*) FROM read_parquet({paths})").fetchall() == [(len(expected),)]


def test_files_are_the_same_bytes_for_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    stages = [
        {"kind": "map", "function": function(folder, "whole"), "columns": {"part": "BIGINT"}, "batch": True},
        {"kind": "cap", "by": ["lang"], "rows": 30, "order": "random"},
        {"kind": "sql", "columns": {"size": "length(text)"}},
    ]
    one, other = (go(folder, str(tmp_path / f"s{n}"), *stages, workers=n) for n in (1, 3))
    assert one.manifest.files == other.manifest.files and one.meta == other.meta
    assert other.meta["stages"][2]["out"] == 90


def test_result_is_cut_into_files_and_row_groups(folder: Path, store: str) -> None:
    whole = pa.table({"id": list(range(40)), "blob": ["x" * 100_000] * 40})
    pq.write_table(whole, folder / "rows.parquet")
    made = go(folder, store, batch_rows=4, sink={"file_mb": 2, "row_group_mb": 1})
    groups = [pq.ParquetFile(made.path(name)).num_row_groups for name in made.names()]
    assert groups == [2, 2]
    assert ds.dataset(made.directory(), exclude_invalid_files=True).to_table().column("id").to_pylist() == list(
        range(40)
    )


def test_empty_result_has_columns(folder: Path, store: str) -> None:
    made = go(folder, store, {"kind": "where", "predicate": "id < 0"}, {"kind": "distinct", "by": ["text"]})
    assert pq.read_table(made.path("rows-00000.parquet")).schema.names == ["id", "text", "lang", "user"]
    assert made.meta["rows"] == 0


def test_equal_work_is_found_and_a_changed_stage_keeps_those_before_the_selection(folder: Path, store: str) -> None:
    shout = {"kind": "map", "function": function(folder, "shout"), "columns": {"loud": "VARCHAR"}}
    first = go(folder, store, shout, {"kind": "distinct", "by": ["text"]})
    assert len(calls(folder)) == 200
    assert go(folder, store, shout, {"kind": "distinct", "by": ["text"]}).ref == first.ref
    assert (
        go(folder, store, {**shout, "name": "louder"}, {"kind": "distinct", "by": ["text"]}, workers=2).ref == first.ref
    )
    changed = go(folder, store, shout, {"kind": "distinct", "by": ["user"]})
    assert changed.meta["rows"] == 7 and len(calls(folder)) == 200
    assert {"data", "data_kept", "data_rows"} == set(artifact_kinds(open_store(store)))
    file = next(folder.glob("functions_*.py"))
    file.write_text(file.read_text().replace("upper()", "lower()"))
    assert go(folder, store, shout, {"kind": "distinct", "by": ["text"]}).ref.key != first.ref.key
    assert len(calls(folder)) == 400


def test_samples_do_not_depend_on_the_order_of_the_rows(folder: Path, tmp_path: Path) -> None:
    stages = [{"kind": "sample", "share": 0.5, "seed": 3}, {"kind": "sample", "rows": 40}]
    found = ids(folder, str(tmp_path / "a"), *stages)
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    pq.write_table(pa.Table.from_pylist(shuffled), folder / "rows.parquet")
    again = ids(folder, str(tmp_path / "b"), *stages)
    assert len(found) == 40 and sorted(found) == sorted(again) != again
    assert [row["id"] for row in shuffled if row["id"] in set(found)] == again
    assert set(ids(folder, str(tmp_path / "c"), stages[0], {"kind": "sample", "rows": 40, "seed": 1})) != set(found)


def test_stages_with_one_seed_draw_independently(folder: Path, store: str) -> None:
    half = {"kind": "sample", "share": 0.5}
    once, twice = (set(ids(folder, store, *[half] * count)) for count in (1, 2))
    assert twice < once and 30 < len(twice) < 70
    least = ids(folder, store, {"kind": "sample", "rows": 60}, half)
    assert 15 < len(least) < 45


@pytest.mark.parametrize("place", ["jsonl", "join", "sql", "map"])
def test_order_of_columns_is_part_of_the_key(folder: Path, store: str, place: str) -> None:
    def made(*names: str) -> tuple[list[str], str]:
        settings, stages = {}, [{"kind": "distinct", "by": ["id"]}]
        if place == "jsonl":
            (folder / "one.jsonl").write_text('{"id": 1, "a": 2, "b": 3}')
            columns = {"id": "BIGINT"} | dict.fromkeys(names, "BIGINT")
            settings = {"source": {"kind": "jsonl", "path": "one.jsonl", "columns": columns}}
        elif place == "join":
            columns = {{"a": "name", "b": "age"}[each]: "VARCHAR" for each in names}
            stages.insert(0, {**JOIN, "columns": columns, "missing": "null", "several": "first"})
            with sqlite3.connect(folder / "users.db") as database:
                database.execute("UPDATE users SET age = 'old'")
        elif place == "sql":
            stages.insert(0, {"kind": "sql", "columns": dict.fromkeys(names, "1")})
        else:
            columns = dict.fromkeys(names, "BIGINT")
            stages.insert(0, {"kind": "map", "function": function(folder, "empty"), "columns": columns})
        artifact = go(folder, store, *stages, **settings)
        return list(rows_of(artifact)[0])[-2:], artifact.ref.key

    (first, one), (other, two) = made("a", "b"), made("b", "a")
    assert first == other[::-1] and one != two


def test_balance_gives_the_most_rows_with_these_shares(folder: Path, store: str) -> None:
    counts = collections.Counter(row["lang"] for row in ROWS)
    assert counts == {"py": 80, "go": 80, "c": 40}
    made = go(folder, store, {"kind": "balance", "column": "lang", "shares": {"py": 0.7, "c": 0.3}})
    assert collections.Counter(row["lang"] for row in rows_of(made)) == {"py": 80, "c": 34}
    with pytest.raises(PipelineError, match=r"stages\.0 \(balance\)\.shares: no row has lang = 'rust'"):
        go(folder, store, {"kind": "balance", "column": "lang", "shares": {"py": 0.7, "rust": 0.3}})


def test_near_duplicates_of_an_earlier_row_are_left_out(folder: Path, store: str) -> None:
    words = [f"word{number}" for number in range(300)]
    texts = [" ".join(words[:200]), " ".join(words[100:300]), " ".join([*words[:197], "a", "b", "c"]), "other text", ""]
    pq.write_table(pa.table({"id": list(range(5)), "text": texts}), folder / "rows.parquet")
    near = {"column": "text", "threshold": 0.8, "ngram": 3}
    assert ids(folder, store, {"kind": "distinct", "near": near}) == [0, 1, 3, 4]
    assert ids(folder, store, {"kind": "distinct", "near": {**near, "threshold": 1.0}}) == [0, 1, 2, 3, 4]


def test_selection_that_needs_more_memory_says_so(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    step = Step(0, DistinctStage(kind="distinct", near=Near(column="text")), "id", schema, schema)
    selection = Selection(step, tmp_path, 1)
    keys = keys_of(step, pa.table({"id": range(4000), "text": [f"text {n}" for n in range(4000)]}, schema))
    with pytest.raises(PipelineError, match=r"stages\.0 \(distinct\): DuckDB can't select .* raise memory_mb"):
        for _ in range(5):
            selection.add(keys)
        selection.write(tmp_path / "kept.parquet")
    selection.close()


def test_lines_of_json_that_do_not_fit_are_named_or_counted(folder: Path, store: str) -> None:
    lines = [
        *(json.dumps({"id": n, "tags": ["a"], "more": {"x": n}}) for n in range(30)),
        "",
        '{"id": 30, "tags": "a"}',
    ]
    (folder / "lines.jsonl").write_text("\n".join([*lines, *["{}"] * 20, "no json", '{"id": 31}', ""]))
    source = {
        "kind": "jsonl",
        "path": "lines.jsonl",
        "columns": {"id": "BIGINT", "tags": "VARCHAR[]", "more": "VARCHAR"},
    }
    with pytest.raises(PipelineError, match=r"lines\.jsonl line 32: tags = 'a' is no VARCHAR\[\]"):
        go(folder, store, source=source)
    with pytest.raises(PipelineError, match=r"more\.jsonl line 33: Expecting value"):
        (folder / "more.jsonl").write_text("\n".join([*lines[:31], "", "no json"]))
        go(folder, store, source={**source, "path": "more.jsonl"})
    made = go(folder, store, source={**source, "on_error": "drop"})
    assert made.meta["stages"][0] == {"stage": "source", "in": 53, "out": 51, "left_out": {"unreadable": 2}}
    assert rows_of(made)[29::21] == [
        {"id": 29, "tags": ["a"], "more": '{"x": 29}'},
        {"id": 31, "tags": None, "more": None},
    ]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (gzip.compress(b'{"id": 1}'), "gzip"),
        (pa.compress(b'{"id": 1}', "zstd", asbytes=True), "Zstandard"),
        (bz2.compress(b'{"id": 1}'), "bzip2"),
        ('{"id": 1}\n{"id": 2}\n'.encode("utf-16"), "UTF-16"),
    ],
    ids=["gzip", "zstd", "bzip2", "utf16"],
)
def test_file_that_is_no_text_is_refused_also_if_lines_may_be_dropped(folder: Path, data: bytes, named: str) -> None:
    (folder / "lines.jsonl").write_bytes(data)
    source = {"kind": "jsonl", "path": "lines.jsonl", "columns": {"id": "BIGINT"}, "on_error": "drop"}
    with pytest.raises(PipelineError, match=rf"source: .*lines\.jsonl is {named}: write it as UTF-8 text"):
        plan_pipeline(Pipeline.model_validate(values(source=source)), folder)


def test_text_of_a_file_that_is_no_utf8_is_refused(folder: Path, store: str) -> None:
    texts = pa.array([b"text"] * 20 + [b"\xff"])
    column = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
    pq.write_table(pa.table({"id": range(len(texts)), "text": column}), folder / "rows.parquet")
    with pytest.raises(PipelineError, match=r"rows\.parquet can't be read behind row 16: In column 1: .*UTF8 .* 4:"):
        go(folder, store)
    source = {"kind": "parquet", "path": "rows.parquet", "columns": ["id"]}
    assert ids(folder, store, source=source) == [*range(len(texts))]


def test_file_whose_name_is_a_pattern_is_that_file(folder: Path, store: str) -> None:
    for number, name in enumerate(("rows1.jsonl", "rows[1].jsonl", "rows2.jsonl")):
        (folder / name).write_text(f'{{"id": {number}}}\n')
    source = {"kind": "jsonl", "columns": {"id": "BIGINT"}}
    assert ids(folder, store, source={**source, "path": "rows[1].jsonl"}) == [1]
    assert ids(folder, store, source={**source, "path": "rows[12].jsonl"}) == [0, 2]
    assert ids(folder, store, source={**source, "path": "rows*.jsonl"}) == [0, 2, 1]


def test_file_that_appears_while_others_are_opened_is_not_in_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*arguments: Any) -> Reader:
        (folder / "rows-later.parquet").write_bytes((folder / "rows.parquet").read_bytes())
        return open_source(*arguments)

    pipeline = Pipeline.model_validate(values(source={"kind": "parquet", "path": "rows*.parquet"}))
    key = plan_pipeline(pipeline, folder).key
    monkeypatch.setattr("curation.pipeline.plan.open_source", opened)
    assert plan_pipeline(pipeline, folder).key == key


WRONG = [
    ("BIGINT", 1.99),
    ("BIGINT[]", [1, -0.5]),
    ("STRUCT(n BIGINT)[]", [{"n": 1.5}]),
    ("VARCHAR[]", "abc"),
    ("STRUCT(tags VARCHAR[])", {"tags": "abc"}),
    ("VARCHAR[][]", [["a"], "bc"]),
    ("DOUBLE", True),
]


@pytest.mark.parametrize(("kind", "value"), WRONG)
def test_values_that_do_not_fit_are_never_altered(folder: Path, store: str, kind: str, value: Any) -> None:
    (folder / "lines.jsonl").write_text(json.dumps({"id": 1, "v": value}) + '\n{"id": 2}\n')
    source = {"kind": "jsonl", "path": "lines.jsonl", "columns": {"id": "BIGINT", "v": kind}}
    with pytest.raises(PipelineError, match=rf"line 1: v = .* is no {re.escape(kind)}"):
        go(folder, store, source=source)
    assert rows_of(go(folder, store, source={**source, "on_error": "drop"})) == [{"id": 2, "v": None}]
    given = {
        "kind": "map",
        "function": function(folder, "given"),
        "columns": {"v": kind},
        "options": {"value": value},
        "input": ["id"],
    }
    with pytest.raises(PipelineError, match="the row with id 0 fails: "):
        go(folder, store, given)
    assert ids(folder, store, {**given, "on_error": "drop"}) == [id for id in range(200) if id]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BIGINT", Decimal("1.9")),
        ("BIGINT", Decimal("Infinity")),
        ("INTEGER", np.float32(1.5)),
        ("DATE", datetime.datetime(2026, 1, 2, 3)),
        ("TIMESTAMP", 1.5),
        ("TIMESTAMP_S", datetime.datetime(2026, 1, 2, 3, 4, 5, 6)),
        ("TIMESTAMP_MS", datetime.datetime(2026, 1, 2, 3, 4, 5, 6)),
        ("BIGINT[]", b"ab"),
        ("VARCHAR[]", {"a", "b"}),
        ("STRUCT(n BIGINT)", [("n", 1)]),
    ],
)
def test_python_values_that_do_not_fit_are_refused(kind: str, value: Any) -> None:
    with pytest.raises(UNFIT):
        array_of([None, value], schema_of({"v": kind}, "v").field("v").type)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("BIGINT", 2.0),
        ("BIGINT", Decimal("2.0")),
        ("INTEGER", np.int8(2)),
        ("DATE", datetime.datetime(2026, 1, 2)),
        ("TIMESTAMP_MS", datetime.datetime(2026, 1, 2, 3, 4, 5, 6000)),
        ("BIGINT[]", np.array([1, 2])),
        ("STRUCT(n BIGINT[])[]", [{"n": (1, 2)}, None, {"other": 3}]),
    ],
)
def test_equal_values_of_other_types_fit(kind: str, value: Any) -> None:
    (found,) = array_of([value], schema_of({"v": kind}, "v").field("v").type).to_pylist()
    expected = {
        "BIGINT": 2,
        "INTEGER": 2,
        "DATE": datetime.date(2026, 1, 2),
        "TIMESTAMP_MS": datetime.datetime(2026, 1, 2, 3, 4, 5, 6000),
        "BIGINT[]": [1, 2],
        "STRUCT(n BIGINT[])[]": [{"n": [1, 2]}, None, {"n": None}],
    }
    assert found == expected[kind]


def test_types_do_not_depend_on_the_time_zone_of_the_machine() -> None:
    program = (
        "from curation.pipeline.schemas import schema_of; print(schema_of({'v': 'TIMESTAMPTZ'}, 'v').field('v').type)"
    )
    away = {**os.environ, "TZ": "America/New_York"}
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=away) == b"timestamp[us, tz=UTC]\n"


def test_batch_without_results_of_a_function_is_empty(folder: Path, store: str) -> None:
    late = {"kind": "map", "function": function(folder, "late")}
    assert ids(folder, store, late) == list(range(100, 200))


def test_function_gets_no_table_without_rows(folder: Path, store: str) -> None:
    first = {"kind": "map", "function": function(folder, "first"), "batch": True, "columns": {"part": "BIGINT"}}
    made = go(folder, store, {"kind": "where", "predicate": "id < 10 OR id > 190"}, first)
    assert {row["part"] for row in rows_of(made)} == {0, 191, 192}


def test_exit_in_a_function_is_an_error_of_its_row(folder: Path, store: str) -> None:
    leaves = {"kind": "map", "function": function(folder, "leaves")}
    with pytest.raises(PipelineError, match="the row with id 5 fails: SystemExit: 0"):
        go(folder, store, leaves)
    assert go(folder, store, {**leaves, "on_error": "drop"}).meta["stages"][1]["left_out"] == {"error: SystemExit": 1}
    (folder / "program.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(PipelineError, match="program:f': SystemExit: 0"):
        go(folder, store, {"kind": "map", "function": "program:f"})


def test_row_that_lacks_memory_is_never_dropped(folder: Path, store: str) -> None:
    grows = {"kind": "map", "function": function(folder, "grows"), "on_error": "drop"}
    with pytest.raises(
        PipelineError, match=r"the row with id 5 fails: MemoryError: .*: free memory, or correct [^,]*$"
    ):
        go(folder, store, grows)


@pytest.mark.parametrize(
    "text",
    [
        "from helper import wrap\n@wrap\ndef f(row):\n    return {'v': VALUE}\n",
        pytest.param(
            "import functools\nfrom helper import named\nf = functools.partial(named, v=VALUE)\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_changed_file_of_a_wrapped_function_gives_another_key(tmp_path: Path, store: str, text: str) -> None:
    def value(name: str, given: int) -> int:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": [1]}), folder / "rows.parquet")
        (folder / "helper.py").write_text(
            "def wrap(f):\n    return lambda row: f(row)\n\ndef named(row, v):\n    return {'v': v}\n"
        )
        (folder / "clean.py").write_text(text.replace("VALUE", str(given)))
        made = go(folder, store, {"kind": "map", "function": "clean:f", "columns": {"v": "BIGINT"}})
        return int(rows_of(made)[0]["v"])

    # a module of the same name in another folder is another one
    assert [value("a", 1), value("a", 22), value("b", 333), value("b", 4444)] == [1, 22, 333, 4444]


def test_log_of_a_duckdb_file_is_part_of_the_key(folder: Path, store: str) -> None:
    write = "import duckdb, os, sys; c = duckdb.connect('log.duckdb'); c.execute(sys.argv[1]); os.kill(os.getpid(), 9)"

    def rows(statement: str) -> int:
        subprocess.run([sys.executable, "-c", write, statement], cwd=folder, check=False)
        assert (folder / "log.duckdb.wal").stat().st_size
        return len(rows_of(go(folder, store, source=source)))

    database = {"kind": "duckdb", "path": "log.duckdb"}
    source = {"kind": "database", "database": database, "table": "t", "key": "id", "columns": {"id": "BIGINT"}}
    duckdb.connect(str(folder / "log.duckdb")).execute("CREATE TABLE t (id BIGINT)").close()
    assert rows("INSERT INTO t FROM range(3)") == 3
    assert rows("INSERT INTO t FROM range(10, 14)") == 7


@pytest.mark.parametrize(
    ("stage", "message", "reason", "left"),
    [
        (
            {"kind": "map", "function": "fails", "columns": {"loud": "VARCHAR"}},
            "37 fails: KeyError: 'no",
            "KeyError",
            1,
        ),
        ({"kind": "map", "function": "wrong_type", "columns": {"part": "BIGINT"}}, "5 fails: Ar", "ArrowInvalid", 1),
        (sql("CAST(if(id > 197, 'x', '1') AS BIGINT)")[0], "198 fails: Conv", "ConversionException", 2),
        ({"kind": "where", "predicate": "CAST(if(id = 9, 'x', '1') AS INT) = 1"}, "9 f", "ConversionException", 1),
    ],
)
def test_failing_row_is_named_or_dropped_alone(
    folder: Path, store: str, stage: dict[str, Any], message: str, reason: str, left: int
) -> None:
    if "function" in stage:
        stage = {**stage, "function": function(folder, stage["function"])}
    with pytest.raises(PipelineError, match=rf"stages\.0 \({stage['kind']}\): the row with id {message}"):
        go(folder, store, stage)
    made = go(folder, store, {**stage, "on_error": "drop"})
    assert made.meta["rows"] == 200 - left and made.meta["stages"][1]["left_out"] == {f"error: {reason}": left}


def test_row_that_breaks_duckdb_is_dropped_alone(folder: Path, store: str) -> None:
    times = [2**62 if number == 37 else number for number in range(200)]  # beyond DuckDB's range: an internal error
    rows = pa.table({"id": range(200), "made": pa.array(times, pa.timestamp("ms"))})
    pq.write_table(rows, folder / "rows.parquet")
    stage = {"kind": "sql", "columns": {"day": "made::VARCHAR"}}
    with pytest.raises(PipelineError, match=r"the row with id 37 fails: InternalException: .*Could not convert"):
        go(folder, store, stage)
    made = go(folder, store, {**stage, "on_error": "drop"})
    assert made.meta["stages"][1]["left_out"] == {"error: InternalException": 1} and made.meta["rows"] == 199


def test_row_whose_key_duckdb_can_not_compute_is_named(folder: Path, store: str) -> None:
    times = pa.array([0, 1, 10**15], pa.timestamp("s", "UTC"))
    pq.write_table(pa.table({"id": range(3), "made": times}), folder / "rows.parquet")
    message = r"the row with id 2 fails: ConversionException: .*: correct the stage or the row$"
    for stage in ({"kind": "distinct", "by": ["made"]}, {"kind": "sample", "share": 0.5, "by": ["made"]}):
        with pytest.raises(PipelineError, match=message):
            go(folder, store, stage)


def test_times_that_python_does_not_hold_are_refused_as_keys_of_a_join(folder: Path, store: str) -> None:
    pq.write_table(pa.table({"id": [1], "user": pa.array([1], pa.timestamp("ns"))}), folder / "rows.parquet")
    with pytest.raises(PipelineError, match=r"stages\.0 \(join\): "):
        go(folder, store, {**JOIN, "columns": {"age": "BIGINT"}})


def test_durations_are_never_cut(folder: Path, store: str) -> None:
    def distinct(nanoseconds: list[int]) -> int:
        took = pa.array(nanoseconds, pa.duration("ns"))
        pq.write_table(pa.table({"id": range(len(took)), "took": took}), folder / "rows.parquet")
        return len(ids(folder, store, {"kind": "distinct", "by": ["took"]}))

    assert distinct([1000, 2000, 1000]) == 2
    with pytest.raises(PipelineError, match=r"rows\.parquet can't be read .* would lose data"):
        distinct([1, 2])


def test_numbers_of_half_precision_are_widened(folder: Path, store: str) -> None:
    numbers = pa.array([1.5, 0.1, 1.5], pa.float32()).cast(pa.float16())
    pq.write_table(pa.table({"id": range(3), "n": numbers}), folder / "rows.parquet")
    assert [row["n"] for row in rows_of(go(folder, store, {"kind": "distinct", "by": ["n"]}))] == [1.5, 0.0999755859375]


def test_joins_name_missing_and_repeated_keys(folder: Path, store: str) -> None:
    join = {**JOIN, "columns": {"name": "VARCHAR"}}
    with pytest.raises(PipelineError, match=r"has several rows with id = 3: name a unique key"):
        go(folder, store, join)
    with pytest.raises(PipelineError, match=r"the row with id \d+ has user = 4, which users lacks"):
        go(folder, store, {**join, "several": "first"})
    made = go(folder, store, {**join, "several": "first", "missing": "null", "cache_rows": 2})
    assert [row["name"] for row in rows_of(made)[:7]] == ["Ada", "Bo", "Cy", "Dan", None, None, None]
    assert made.meta["stages"][1]["left_out"] == {"missing (null)": sum(row["user"] > 3 for row in ROWS)}
    with pytest.raises(PipelineError, match=r"no such column"):
        go(folder, store, {**join, "columns": {"town": "VARCHAR"}, "missing": "null"})
    with pytest.raises(PipelineError, match=r"the row with key \d has name = '\w+', which is no int64"):
        go(folder, store, {**join, "columns": {"name": "BIGINT"}, "missing": "null", "several": "first"})
    with sqlite3.connect(folder / "users.db") as database:
        database.execute("UPDATE users SET age = 30.9 WHERE id = 0")
    with pytest.raises(PipelineError, match=r"the row with key 0 has age = 30\.9, which is no int64"):
        go(folder, store, {**join, "columns": {"age": "BIGINT"}, "missing": "null", "several": "first"})


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_table_of_a_database_is_read_in_pages_of_its_key(folder: Path, store: str, kind: str) -> None:
    if kind == "duckdb":
        with duckdb.connect(str(folder / "users.duckdb")) as database:
            database.execute("CREATE TABLE t AS SELECT 3 * range AS k, 'n' || range AS v FROM range(100)")
    else:
        with sqlite3.connect(folder / "users.sqlite") as other:
            other.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v TEXT)")
            other.executemany("INSERT INTO t VALUES (?, ?)", [(3 * n, f"n{n}") for n in range(100)])
    source = {
        "kind": "database",
        "database": {"kind": kind, "path": f"users.{kind}"},
        "table": "t",
        "key": "k",
        "columns": {"k": "BIGINT", "v": "VARCHAR"},
    }
    made = go(folder, store, source=source, key="k")
    assert rows_of(made) == [{"k": 3 * n, "v": f"n{n}"} for n in range(100)]


def test_repeated_key_of_a_database_is_refused_also_between_pages(folder: Path, store: str) -> None:
    source = {"kind": "database", "database": {"kind": "sqlite", "path": "users.db"}, "table": "users", "key": "id"}
    with pytest.raises(PipelineError, match=r"source\.key = 'id': it has nulls, equal values"):
        go(folder, store, source={**source, "columns": {"id": "BIGINT"}}, batch_rows=4)


def test_key_of_a_database_with_nulls_is_refused_also_behind_the_last_page(folder: Path, store: str) -> None:
    with duckdb.connect(str(folder / "null.duckdb")) as database:
        database.execute("CREATE TABLE t AS SELECT CASE WHEN range < 50 THEN range END AS id FROM range(60)")
    source = {"kind": "database", "database": {"kind": "duckdb", "path": "null.duckdb"}, "table": "t", "key": "id"}
    for batch_rows in (16, 100):
        with pytest.raises(PipelineError, match=r"source\.key = 'id': it has nulls"):
            go(folder, store, source={**source, "columns": {"id": "BIGINT"}}, batch_rows=batch_rows)


def test_key_of_a_database_that_its_type_alters_does_not_page_for_ever(folder: Path, store: str) -> None:
    with sqlite3.connect(folder / "blob.db") as database:
        database.execute("CREATE TABLE t (id BLOB PRIMARY KEY)")
        database.executemany("INSERT INTO t VALUES (?)", [(b"a",), (b"b",), (b"c",)])
    source = {"kind": "database", "database": {"kind": "sqlite", "path": "blob.db"}, "table": "t", "key": "id"}
    with pytest.raises(PipelineError, match=r"source\.key = 'id': it has .* its type in columns"):
        go(folder, store, source={**source, "columns": {"id": "VARCHAR"}}, batch_rows=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (sql("sum(id)"), r"stages\.0 \(sql\)\.columns\.n = 'sum\(id\)': sum depends"),
        (sql("row_number() OVER ()"), r"columns\.n = .*: row_number depends on more"),
        (sql("random()"), r"random depends on .* time or chance"),
        (sql("now()"), r"now depends on"),
        (sql("current_date"), r"current_date depends on"),
        (sql("LOCALTIME"), r"localtime depends on"),
        (sql("ago(INTERVAL 1 DAY)"), r"ago depends on"),
        (sql("age(TIMESTAMP '2020-01-01')"), r"age depends on"),
        ([{"kind": "sql", "columns": {"Text": "'a'"}}], r"0 \(sql\): the columns text and Text are the same one"),
        (sql("pg_postmaster_start_time()"), r"pg_postmaster_start_time depends on"),
        (sql("geomean(id)"), r"geomean depends on more"),
        (sql("geometric_mean(id)"), r"geometric_mean depends on more"),
        (sql("weighted_avg(id, user)"), r"weighted_avg depends on more"),
        (sql("json_group_array(text)"), r"json_group_array depends on more"),
        (sql("generate_subscripts([1, 2], 1)"), r"generate_subscripts depends on more"),
        (sql("(SELECT max(id) FROM batch)"), r"subquery depends on"),
        (sql("unnest([1, 2])"), r"unnest depends on"),
        (sql("id) FROM batch ORDER BY (id"), r"without commas and FROM"),
        (sql("id +"), r"columns\.n = 'id \+': syntax error"),
        ([{"kind": "where", "predicate": "nobody = 1"}], r"stages\.0 \(where\)\.predicate: .*\"nobody\" not f"),
        (
            [{"kind": "sql", "columns": {"n": "id + 1", "m": "n + 1", "o": "nobody"}}],
            r"\(sql\)\.columns\.o: .*\"nobody\" not found",
        ),
        ([{"kind": "where", "predicate": "id + 1"}], r"predicate = 'id \+ 1': its type is no BOOLEAN"),
        ([{"kind": "map", "function": "nowhere:f"}], r"function = 'nowhere:f': ModuleNotFoundError"),
        ([{"kind": "map", "function": "json:dumps", "columns": {"n": "BIGINTT"}}], r"n = 'BIGINTT': .*write a type"),
        ([*sql("[id]"), {**JOIN, "by": "n", "columns": {"age": "BIGINT"}}], r"1 \(join\)\.by = 'n': it is list<"),
        ([{"kind": "distinct", "by": ["none"]}], r"stages\.0 \(distinct\): there is no column none"),
        ({"source": {"kind": "parquet", "path": "none*.parquet"}}, r"path = 'none\*\.parquet': no such file"),
        ({"key": "nokey"}, r"key = 'nokey': the source has id, text"),
    ],
)
def test_settings_that_can_not_run_are_refused_before_any_row(
    folder: Path, change: dict[str, Any] | list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        plan_pipeline(
            Pipeline.model_validate(values() | ({"stages": change} if isinstance(change, list) else change)), folder
        )


def test_column_named_like_a_function_of_time_is_a_column(folder: Path, store: str) -> None:
    named = {
        "kind": "sql",
        "columns": {"current_date": "id", "years": "age(TIMESTAMP '2020-01-01', DATE '2019-01-01')::VARCHAR"},
    }
    made = go(
        folder, store, named, {"kind": "where", "predicate": "current_date < 5"}, {"kind": "sql", "drop": ["years"]}
    )
    assert [row["current_date"] for row in rows_of(made)] == list(range(5))


@pytest.mark.parametrize("names", [("v", "v"), ("v", "V")])
def test_file_whose_columns_are_the_same_one_in_sql_is_refused(
    folder: Path, store: str, names: tuple[str, str]
) -> None:
    pq.write_table(pa.table([[1], [2], [3]], ["id", *names]), folder / "rows.parquet")
    with pytest.raises(PipelineError, match=rf"rows\.parquet: the columns v and {names[1]} are the same one in SQL"):
        go(folder, store)
    source = {"kind": "parquet", "path": "rows.parquet", "columns": ["id"]}
    assert rows_of(go(folder, store, source=source)) == [{"id": 1}]


def test_file_with_a_wrong_field_names_its_place(folder: Path) -> None:
    path = folder / "tiny.yaml"
    path.write_text("name: tiny\nkey: id\nsource: {kind: parquet, path: x}\nstages: [{kind: where, predicat: x}]\n")
    with pytest.raises(ConfigError, match=r"stages\.0\.predicat is not a field: did you mean predicate\?"):
        load_pipeline(path)


def test_documented_pipeline_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(Pipeline.model_validate(load_yaml(block)).stages) == 8


def test_runs_with_other_rows_are_versions(folder: Path, store: str) -> None:
    opened = open_store(store)
    first = go(folder, store, {"kind": "where", "predicate": "id < 5"})
    other = go(folder, store, {"kind": "where", "predicate": "id < 6"})
    for made in (first, first, other, first):
        record_version(opened, "tiny", made)
    assert [(str(each), each.artifact.ref.digest) for each in versions(opened)] == [
        ("tiny@1", first.ref.digest),
        ("tiny@2", other.ref.digest),
        ("tiny@3", first.ref.digest),
    ]
    assert str(find_version(opened, "tiny@latest")) == str(find_version(opened, "tiny")) == "tiny@3"
    assert find_version(opened, "tiny@2").artifact.ref == other.ref
    with pytest.raises(PipelineError, match="tiny has versions 1 to 3"):
        find_version(opened, "tiny@4")
    with pytest.raises(PipelineError, match="no pipeline none has run"):
        find_version(opened, "none")
