"""Data pipelines: rows, counts, determinism, reuse, and errors."""

from __future__ import annotations

import collections
import json
import random
import re
import sqlite3
from pathlib import Path
from typing import Any

import duckdb
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
from curation.pipeline.selections import Selection, keys_of
from curation.pipeline.versions import find_version, record_version, versions
from resources.data_pipeline import load_pipeline
from tests.curation.pipelines import ROWS, calls, function, go, rows_of, values, world

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
        (sql("(SELECT max(id) FROM batch)"), r"subquery depends on"),
        (sql("unnest([1, 2])"), r"unnest depends on"),
        (sql("id) FROM batch ORDER BY (id"), r"without commas and FROM"),
        (sql("id +"), r"columns\.n = 'id \+': syntax error"),
        ([{"kind": "where", "predicate": "nobody = 1"}], r"stages\.0 \(where\): .*\"nobody\" not found"),
        ([{"kind": "where", "predicate": "id + 1"}], r"predicate = 'id \+ 1': its type is no BOOLEAN"),
        ([{"kind": "map", "function": "nowhere:f"}], r"function = 'nowhere:f': ModuleNotFoundError"),
        ([{"kind": "map", "function": "json:dumps", "columns": {"n": "BIGINTT"}}], r"n = 'BIGINTT': .*write a type"),
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
