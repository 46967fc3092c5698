"""Stages that need one row at a time: they run in worker processes, on a batch at once.

A failing batch is halved until the failing row stands alone, so that an error names it and `on_error: drop` loses it
alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from curation.errors import PipelineError, one_line
from curation.pipeline.config import MapStage, SampleStage, SqlStage, Stage, WhereStage
from curation.pipeline.schemas import array_of, plain, require_columns, schema_of, set_columns, with_columns

RowStage = SqlStage | WhereStage | MapStage | SampleStage
Tally = Counter[tuple[int, str]]
"""Rows by number of the stage (-1: the source) and what became of them: in, out, or the reason for leaving it out."""
Work = Callable[[pa.Table], tuple[pa.Table, dict[str, int]]]
"""Rows -> rows that stay, and the number of those that do not, by reason."""
_WHOLE = 2**64
_folders = set[Path]()
"""Folders from which functions were imported."""
_TIMES = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
"""Names that are functions of time unless the row has such a column."""
_SEVERAL = ("WINDOW", "SUBQUERY", "STAR")
"""Classes of expressions over several rows."""


@dataclass(frozen=True)
class Step:
    """A stage in its place."""

    number: int
    """From 0, in the file."""
    stage: Stage
    key: str
    """Column that identifies a row, if the rows still have it."""
    before: pa.Schema
    after: pa.Schema
    drawn: int = 0
    """Number of earlier stages that draw rows."""

    @property
    def place(self) -> str:
        """Place in the file, for errors."""
        return f"stages.{self.number} ({self.stage.called})"

    def row(self, table: pa.Table, index: int = 0) -> str:
        """Description of a row, for errors."""
        if self.key in table.column_names:
            return f"the row with {self.key} {table.column(self.key)[index].as_py()!r:.80}"
        return f"a row (its column {self.key} was dropped)"


class Session:
    """DuckDB with one thread, without access to files, whose expressions see one row at a time."""

    def __init__(self) -> None:
        self._connect()

    def _connect(self) -> None:
        self._connection = duckdb.connect(config={"threads": 1})
        self._connection.execute("SET TimeZone = 'UTC'; SET enable_external_access = false")

    def columns(self, table: pa.Table, expressions: dict[str, str]) -> pa.Table:
        """Values of expressions, by name, in the order of the rows. Raises duckdb.Error."""
        self._connection.register("batch", table)
        try:
            chosen = ", ".join(f'({text}\n) AS "{name}"' for name, text in expressions.items())
            return self._connection.sql(f"SELECT {chosen} FROM batch").to_arrow_table()
        except (duckdb.InternalException, duckdb.FatalException):
            self._connect()  # after such an error, DuckDB refuses all further queries of the database
            raise
        finally:
            self._connection.unregister("batch")

    def schema(self, before: pa.Schema, expressions: dict[str, str], place: str) -> pa.Schema:
        """Types of expressions. Raises PipelineError if one is invalid, or depends on other rows, time or chance."""
        added = pa.table({})
        for count, (name, text) in enumerate(expressions.items(), 1):
            self._require_of_a_row(text, {each.lower() for each in before.names}, f"{place}.{name}")
            try:  # with those before, which it may name
                added = self.columns(before.empty_table(), dict(islice(expressions.items(), count)))
            except duckdb.Error as error:
                raise PipelineError(f"{place}.{name}: {one_line(error)}") from None
        return plain(added.schema, place)

    def _require_of_a_row(self, text: str, columns: set[str], place: str) -> None:
        ((serialized,),) = self._connection.execute("SELECT json_serialize_sql(?)", [f"SELECT ({text}\n)"]).fetchall()
        parsed = json.loads(serialized)
        if parsed["error"]:
            raise PipelineError(f"{place} = {text!r:.80}: {parsed['error_message']}: write one DuckDB expression")
        nodes = [each["node"] for each in parsed["statements"]]
        if len(nodes) != 1 or len(nodes[0].get("select_list", ())) != 1 or nodes[0]["from_table"]["type"] != "EMPTY":
            raise PipelineError(f"{place} = {text!r:.80}: write one DuckDB expression, without commas and FROM")
        for found in _nodes(nodes[0]["select_list"]):
            name = _name_of(found)
            values = found.get("arguments", found.get("children", ()))  # by DuckDB's version
            if (
                found["class"] in _SEVERAL
                or (name in self._refused and not (name in columns and found["class"] == "COLUMN_REF"))
                or (name == "age" and len(values) != 2)  # of one value: up to today
            ):
                what = name or found["class"].lower()
                raise PipelineError(
                    f"{place} = {text!r:.80}: {what} depends on more than one row, or on time or chance, so the result"
                    " would depend on batches: use an expression over one row, or a stage such as cap or sample"
                )

    @functools.cached_property
    def _refused(self) -> set[str]:
        """Functions over several rows, those that give other values each time, and macros that use one of either."""
        rows = self._connection.execute(
            "SELECT function_name FROM duckdb_functions() GROUP BY 1 HAVING"
            " bool_and(function_type IN ('aggregate', 'window')) OR (bool_and(function_type IN ('scalar', 'macro')) AND"
            " bool_and(coalesce(stability, 'CONSISTENT') <> 'CONSISTENT'))"
        ).fetchall()
        # getvariable and the like read what this session has set: nothing
        found = {name for (name,) in rows} | {"unnest", "getenv", "current_user", *_TIMES}
        macros = self._connection.execute(
            "SELECT function_name, json_serialize_sql('SELECT (' || macro_definition || ')') FROM duckdb_functions()"
            " WHERE function_type = 'macro'"
        ).fetchall()
        used = [(name, [*_nodes(json.loads(text))]) for name, text in macros]
        while more := {
            name
            for name, nodes in used
            if name not in found and any(each["class"] in _SEVERAL or _name_of(each) in found for each in nodes)
        }:
            found |= more
        return found


def after_row_stage(stage: RowStage, before: pa.Schema, key: str, place: str, folder: Path) -> pa.Schema:
    """Schema of the rows behind a stage. Raises PipelineError."""
    if isinstance(stage, SqlStage):
        require_columns(before, stage.drop, f"{place}.drop")
        added = session().schema(before, stage.columns, f"{place}.columns") if stage.columns else pa.schema([])
        return with_columns(before, added, stage.drop)
    if isinstance(stage, WhereStage):
        found = session().schema(before, {"predicate": stage.predicate}, place)
        if not pa.types.is_boolean(found.field(0).type):
            raise PipelineError(f"{place}.predicate = {stage.predicate!r:.80}: its type is no BOOLEAN: compare it")
        return before
    if isinstance(stage, MapStage):
        require_columns(before, stage.input, f"{place}.input")
        load_function(stage, folder, place)
        return with_columns(before, schema_of(stage.columns, f"{place}.columns"))
    require_columns(before, stage.by or (key,), f"{place}.by")
    return before


def key_text(columns: tuple[str, ...]) -> str:
    """DuckDB expression: the values of columns as one text, which is the same for equal values only."""
    return "to_json({" + ", ".join(f"'{name}': \"{name}\"" for name in columns) + "})::VARCHAR"


def draw(columns: tuple[str, ...], seed: int, drawn: int = 0) -> str:
    """DuckDB expression: uniformly distributed uint64 by seed, `Step.drawn` and the values of columns."""
    return f"md5_number_lower('{seed}:{drawn}:' || {key_text(columns)})"


def load_function(stage: MapStage, folder: Path, place: str) -> Callable[..., Any]:
    """Import the function of a stage. Raises PipelineError."""
    module, _, name = stage.function.partition(":")
    _prefer(folder)
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        inspect.signature(found).bind(None, **stage.options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's module raises
        raise PipelineError(
            f"{place}.function = {stage.function!r}: {type(error).__name__}: {one_line(error)}: name a function of one"
            " argument and `options`"
        ) from None
    return found


def function_files(stage: MapStage, folder: Path, place: str) -> list[Path]:
    """Files of the module that a stage names, and of those that define the function; none for built-in ones."""
    found: Any = load_function(stage, folder, place)
    while isinstance(found, functools.partial):
        found = found.func
    names = [getattr(each, "__module__", None) or "" for each in (found, inspect.unwrap(found))]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in (stage.function.partition(":")[0], *names)]
    return [Path(file) for file in dict.fromkeys(files) if file]


def _prefer(folder: Path) -> None:
    """Import modules from `folder` first, also those of which another pipeline's folder gave one of the same name."""
    folder = folder.absolute()
    sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
    for name, loaded in list(sys.modules.items()):
        file = Path(getattr(loaded, "__file__", None) or "")
        if "." in name or not any(other in file.parents for other in _folders - {folder}):
            continue
        own = next((each for each in (folder / name / "__init__.py", folder / f"{name}.py") if each.is_file()), file)
        if own.resolve() != file.resolve():
            for part in [each for each in sys.modules if each.partition(".")[0] == name]:
                del sys.modules[part]
    _folders.add(folder)


def work_of(step: Step, folder: Path) -> Work:
    """Function that runs a stage on a batch. Raises PipelineError."""
    stage = step.stage
    if isinstance(stage, SqlStage):
        plain_work = functools.partial(_sql, stage, step.after)
    elif isinstance(stage, WhereStage):
        plain_work = functools.partial(_where, stage.predicate, "false")
    elif isinstance(stage, SampleStage):
        assert stage.share is not None, "a number of rows is a selection"
        bound = int(stage.share * _WHOLE)
        plain_work = functools.partial(
            _where, f"{draw(stage.by or (step.key,), stage.seed, step.drawn)} < {bound}", "not drawn"
        )
    elif isinstance(stage, MapStage):
        function = functools.partial(load_function(stage, folder, step.place), **stage.options)
        plain_work = functools.partial(_map_batch if stage.batch else _map_rows, stage, step.after, function)
    else:
        raise AssertionError(f"{stage.kind} is no stage of rows")
    return functools.partial(carefully, step, plain_work)


def carefully(step: Step, work: Work, table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    """Result of `work`, without rows for which it fails, or PipelineError that names the first one, by `on_error`.
    No row is left out because memory is short.
    """
    try:
        return work(table)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's function raises
        if table.num_rows > 1:
            half = table.num_rows // 2
            parts = [carefully(step, work, table.slice(0, half)), carefully(step, work, table.slice(half))]
            return pa.concat_tables([found for found, _ in parts]), dict(Counter(parts[0][1]) + Counter(parts[1][1]))
        on_error = getattr(step.stage, "on_error", None)
        lacks = isinstance(error, MemoryError | duckdb.OutOfMemoryException)  # a fault of the machine, not of the row
        if on_error == "drop" and not lacks:
            return step.after.empty_table(), {f"error: {type(error).__name__}": 1}
        fix = "free memory, or " * lacks + "correct the stage or the row"
        fix += ", or set on_error to drop" * (on_error == "fail")
        raise PipelineError(
            f"{step.place}: {step.row(table)} fails: {type(error).__name__}: {one_line(error)}: {fix}"
        ) from None


def _sql(stage: SqlStage, after: pa.Schema, table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    added = session().columns(table, stage.columns) if stage.columns else pa.table({})
    return set_columns(table, added, after), {}


def _where(predicate: str, reason: str, table: pa.Table) -> tuple[pa.Table, dict[str, int]]:
    mask = session().columns(table, {"keep": predicate}).column("keep")
    kept = table.filter(mask)
    return kept, {reason: table.num_rows - kept.num_rows}


def _map_rows(
    stage: MapStage, after: pa.Schema, function: Callable[..., Any], table: pa.Table
) -> tuple[pa.Table, dict[str, int]]:
    indices, values, none = list[int](), {name: list[Any]() for name in stage.columns}, 0
    read = table.select(stage.input) if stage.input else table
    old = {name: table.column(name) for name in values if name in table.column_names}
    for index, row in enumerate(read.to_pylist()):
        result = function(row)
        rows = [result] if isinstance(result, dict) else result
        if rows is None or rows == []:
            none += 1
            continue
        for each in rows:
            unknown = next((name for name in each if name not in values), None)
            if unknown is not None:
                raise ValueError(f"the function sets {unknown!r}, which the stage's columns do not name")
            indices.append(index)
            for name, found in values.items():
                found.append(each[name] if name in each else old[name][index].as_py() if name in old else None)
    added = pa.table([array_of(found, after.field(name).type) for name, found in values.items()], list(values))
    same = indices == list(range(table.num_rows))
    return set_columns(table if same else table.take(pa.array(indices, pa.int64())), added, after), {"none": none}


def _map_batch(
    stage: MapStage, after: pa.Schema, function: Callable[..., Any], table: pa.Table
) -> tuple[pa.Table, dict[str, int]]:
    if not table.num_rows:  # no row that the function may fail for
        return after.empty_table(), {}
    result = function(table)
    if not isinstance(result, pa.Table):
        raise TypeError(f"the function returned {type(result).__name__}: return a pyarrow.Table")
    missing = set(after.names) - set(result.column_names)
    if missing:
        raise ValueError(f"the function's table has no column {min(missing)}")
    left = table.num_rows - result.num_rows
    return result.select(after.names).cast(after), {"none": max(0, left)}


def run_steps(steps: list[tuple[Step, Work]], table: pa.Table) -> tuple[pa.Table, Tally]:
    """Run stages of rows one after the other."""
    tally: Tally = Counter()
    for step, work in steps:
        table = counted(tally, step, table, work(table))
    return table, tally


def counted(tally: Tally, step: Step, before: pa.Table, done: tuple[pa.Table, dict[str, int]]) -> pa.Table:
    """Count what a stage did with a batch. Returns the rows that stay."""
    table, reasons = done
    tally[step.number, "in"] += before.num_rows
    tally[step.number, "out"] += table.num_rows
    tally.update({(step.number, reason): count for reason, count in reasons.items() if count})
    return table


@functools.cache
def session() -> Session:
    """The session of this process."""
    return Session()


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Expressions in a parsed statement."""
    if isinstance(value, dict):
        if "class" in value:
            yield value
        for each in value.values():
            yield from _nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nodes(each)


def _name_of(expression: dict[str, Any]) -> str:
    """Function that an expression calls, also one of time without parentheses; empty: none."""
    column = expression["column_names"][0].lower() if expression["class"] == "COLUMN_REF" else ""
    return expression.get("function_name", "") or (column if column in _TIMES else "")
