"""Tables keep what was put in, and a digest names content, not the way it is stored."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.digests import action_key, canonical_json, sha256, table_digest, tensors_digest
from contracts.episodes import (
    ROUTED_EXPERTS,
    SUPPORTS,
    Episode,
    Outcome,
    Slot,
    TokenRole,
    TokenSequence,
    ToolCallRecord,
    episode_id,
    episodes_table,
    read_episodes,
    sequences_table,
    telemetry_table,
)
from contracts.errors import SchemaError
from contracts.tasks import Split, Task, read_tasks, tasks_table

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
FLOATS32 = st.floats(-100, 0, width=32)


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    roles = draw(st.lists(st.sampled_from(TokenRole), max_size=20))
    ids = [draw(st.integers(0, 2**31 - 1)) for _ in roles]
    logprobs = [draw(FLOATS32) if role == TokenRole.POLICY else None for role in roles]
    routes, supports = draw(st.none() | st.binary(max_size=20)), draw(st.none() | st.binary(max_size=20))
    return TokenSequence(ids, [int(role) for role in roles], logprobs, [("v1", 0, len(roles))], routes, supports)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    slot = Slot("e", "0001", "g", draw(TEXT), draw(st.integers(0, 9)), 7)
    calls = draw(st.lists(st.builds(ToolCallRecord, st.integers(0, 9), TEXT, TEXT, st.booleans(), TEXT), max_size=3))
    return Episode(
        episode_id=episode_id(slot, "k"),
        group_id="g",
        task_id=slot.task_id,
        task_digest="t",
        files_digest="i",
        sample=slot.sample,
        attempt=0,
        seed=slot.token_seed,
        policy_version="v1",
        temperature=1.0,
        max_tokens=64,
        outcome=draw(st.sampled_from(Outcome)),
        turns=2,
        tool_calls=calls,
        format_errors=0,
        final_diff=draw(st.binary(max_size=30)),
        sequences=draw(st.lists(sequences(), max_size=2)),
        telemetry={"seconds": 1.5},
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(episodes(), max_size=4, unique_by=lambda episode: episode.episode_id))
def test_episodes_survive_parquet(found: list[Episode]) -> None:
    tables = []
    for table in (episodes_table(found), sequences_table(found, ROUTED_EXPERTS, SUPPORTS)):
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        tables.append(pq.read_table(io.BytesIO(buffer.getvalue())))
    again = read_episodes(*tables)
    assert [{**vars(episode), "telemetry": {}} for episode in found] == [vars(episode) for episode in again]
    assert telemetry_table(found).num_rows == len(found)


VALUES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {
        "n": st.none() | st.integers(-(2**62), 2**62),
        "x": st.none() | st.floats(allow_nan=False),
        "s": st.none() | TEXT,
        "b": st.none() | st.binary(max_size=4),
        "flag": st.none() | st.booleans(),
        "list": st.none() | st.lists(st.none() | FLOATS32, max_size=4),
        "nested": st.none() | st.lists(st.fixed_dictionaries({"k": TEXT, "v": st.integers(0, 9)}), max_size=3),
    }
)
SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("b", pa.binary()),
        ("flag", pa.bool_()),
        ("list", pa.list_(pa.float32())),
        ("nested", pa.list_(pa.struct([("k", pa.string()), ("v", pa.int64())]))),
    ]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(VALUES, max_size=8), st.integers(0, 8))
def test_table_digest_ignores_chunks_and_parquet(rows: list[dict[str, Any]], cut: int) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    chunked = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="gzip", row_group_size=2)
    stored = pq.read_table(io.BytesIO(buffer.getvalue()))
    assert table_digest(table) == table_digest(chunked) == table_digest(stored)
    rebuilt = pa.Table.from_pylist(table.slice(cut).to_pylist(), schema=SCHEMA)
    assert table_digest(table.slice(cut)) == table_digest(rebuilt)


@settings(max_examples=100, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), VALUES, st.integers(0, 3), st.sampled_from(SCHEMA.names))
def test_table_digest_tells_one_changed_value(
    rows: list[dict[str, Any]], other: dict[str, Any], number: int, column: str
) -> None:
    changed = [dict(row) for row in rows]
    changed[number % len(rows)][column] = other[column]
    assert (digest_of_rows(rows) == digest_of_rows(changed)) == (repr(rows) == repr(changed))


@pytest.mark.parametrize(
    ("column", "values", "others"),
    [
        ("n", [0, 1], [None, 1]),
        ("n", [0, 1], [1, 0]),
        ("n", [None], [None, None]),
        ("x", [0.0], [None]),
        ("x", [0.0], [-0.0]),
        ("s", [""], [None]),
        ("s", ["ab", "c"], ["a", "bc"]),
        ("b", [b""], [None]),
        ("b", [b"ab", b"c"], [b"a", b"bc"]),
        ("flag", [False], [None]),
        ("flag", [False], [True]),
        ("list", [[]], [None]),
        ("list", [[0.0]], [[None]]),
        ("list", [[1.0]], [[2.0]]),
        ("list", [[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0]]),
        ("nested", [[]], [None]),
        ("nested", [[None]], [[{"k": None, "v": None}]]),
        ("nested", [[{"k": "a", "v": 1}]], [[{"k": "b", "v": 1}]]),
        ("nested", [[{"k": "a", "v": 1}]], [[{"k": "a", "v": 2}]]),
        ("nested", [[{"k": "a", "v": 0}]], [[{"k": "a", "v": None}]]),
        ("nested", [[{"k": "a", "v": 1}], []], [[], [{"k": "a", "v": 1}]]),
    ],
)
def test_table_digest_tells_one_null_leaf_or_boundary(column: str, values: list[Any], others: list[Any]) -> None:
    one, other = ([{column: value} for value in each] for each in (values, others))
    assert digest_of_rows(one) != digest_of_rows(other)


def test_table_digest_never_changes() -> None:
    """Digests name artifacts of older stores."""
    rows = [
        {
            "n": 1,
            "x": 0.5,
            "s": "\u00e9",
            "b": b"\x00",
            "flag": True,
            "list": [1.0, None],
            "nested": [{"k": "a", "v": 2}],
        },
        {},
    ]
    assert digest_of_rows(rows) == "2057a37667a163d405f277662998b676f746d0199ef8f52b9cc17ec212ef7a13"


def digest_of_rows(rows: list[dict[str, Any]]) -> str:
    return table_digest(pa.Table.from_pylist(rows, schema=SCHEMA))


def test_table_digest_depends_on_names_and_types() -> None:
    base = pa.table({"a": pa.array([1], pa.int64())})
    assert table_digest(base) != table_digest(pa.table({"b": pa.array([1], pa.int64())}))
    assert table_digest(base) != table_digest(pa.table({"a": pa.array([1], pa.int32())}))
    with pytest.raises(SchemaError, match="interval"):
        table_digest(pa.table({"a": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}))


def test_canonical_json_refuses_what_has_no_one_form() -> None:
    assert canonical_json({"b": 1, "a": [None, True, 0.1]}) == b'{"a":[null,true,0.1],"b":1}'
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for bad in (float("nan"), {1, 2}, object(), deep):
        with pytest.raises(SchemaError):
            canonical_json(bad)


def test_action_key_depends_on_every_part_and_not_on_order() -> None:
    base = action_key("s", {"a": "1", "b": "2"}, {"x": 1}, "1")
    assert base == action_key("s", {"b": "2", "a": "1"}, {"x": 1}, "1")
    assert (
        len(
            {
                base,
                action_key("t", {"a": "1", "b": "2"}, {"x": 1}, "1"),
                action_key("s", {"a": "2", "b": "1"}, {"x": 1}, "1"),
                action_key("s", {"a": "1", "b": "2"}, {"x": 1}, "2"),
            }
        )
        == 4
    )


def test_tensors_digest_ignores_order_of_files() -> None:
    one, two = ("a", "F32", (1,), sha256(b"1234")), ("b", "F32", (1,), sha256(b"5678"))
    assert tensors_digest([one, two]) == tensors_digest([two, one])
    assert tensors_digest([one]) != tensors_digest([("a", "I32", (1,), sha256(b"1234"))])


def test_tasks_round_trip() -> None:
    task = Task(
        "t",
        "sum",
        Split.GATE,
        "fix it",
        {"b.py": b"\x00", "a.py": b"1"},
        {"tests/t.py": b""},
        ("tests/t.py::test_a",),
        b"diff",
        {"line": 2},
    )
    assert read_tasks(tasks_table([task])) == [task]
    declares = replace(task, deliverables=("src/", "*.md"))
    assert read_tasks(tasks_table([task, declares])) == [task, declares]
    assert declares.digest != task.digest != replace(task, deliverables=("src/",)).digest
    offered = replace(task, toolset="files")
    assert read_tasks(tasks_table([offered])) == [offered] and offered.digest != task.digest
    assert task.digest == "a6ec040019cfdad1e2abbef9a14078a91199ba409094232853d996e2aa9d4dbd", (
        "a task that declares nothing has the digest that it always had"
    )
    assert "artifacts" not in tasks_table([task]).to_pylist()[0]["meta"], "what declares none keeps its digest"
    assert task.digest != replace(task, instruction="other").digest
    assert task.files_digest == replace(task, instruction="other").files_digest


def test_table_digest_covers_times_and_decimals() -> None:
    values = [datetime(2026, 1, 2, 3), None, datetime(2026, 1, 3)]
    prices = [Decimal("1.5"), None, Decimal(2)]
    table = pa.table({"at": values, "day": pa.array(values).cast(pa.date32()), "price": prices})
    cut = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    assert table_digest(table) == table_digest(cut)
    assert table_digest(table.slice(1)) == table_digest(pa.table(table.slice(1).to_pydict(), schema=table.schema))
    for name in table.column_names:
        turned = table.column(name).take(pa.array([2, 1, 0]))
        other = table.set_column(table.column_names.index(name), table.field(name), turned)
        assert table_digest(other) != table_digest(table)
