"""Sources of rows, in batches that depend only on the source and the size of a batch."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.digests import digest_of, file_sha256
from contracts.errors import SchemaError
from curation.errors import PipelineError, one_line
from curation.pipeline.config import DatabaseSource, JsonlSource, ParquetSource, Pipeline, Source, ordered
from curation.pipeline.databases import Connection, database_digest, database_files, quoted
from curation.pipeline.schemas import UNFIT, array_of, plain, require_distinct, schema_of

PLACE = "source"
SHOWN = 60
"""Maximum characters of a value in an error."""
_NO_TEXT = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Formats by the beginning of a file, that JSON lines are mistaken for."""


@dataclass
class Batch:
    """Rows, and where the next batch begins."""

    table: pa.Table
    cursor: Any
    """JSON value for `Reader.batches`."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows of the source that are not in the table, by reason."""


class Reader(Protocol):
    """Reads a source from a cursor on."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of every batch."""

    @property
    def rows(self) -> int | None:
        """Number of rows, if it is known."""

    def batches(self, cursor: Any) -> Iterator[Batch]:
        """Batches behind `cursor`; None: all. Raises PipelineError."""


def open_source(source: Source, files: Sequence[Path], batch_rows: int, folder: Path) -> Reader:
    """Reader of a source. files: of `source_files`. folder: of the pipeline's file. Raises PipelineError."""
    if isinstance(source, DatabaseSource):
        return _DatabaseReader(source, batch_rows, folder)
    if isinstance(source, ParquetSource):
        return ParquetReader(files, source.columns, batch_rows)
    return _JsonlReader(source, files, batch_rows)


def source_files(source: Source, folder: Path) -> list[Path]:
    """Files of a source, sorted; listed once, since others may appear. Raises PipelineError if there are none."""
    if isinstance(source, DatabaseSource):
        return database_files(source.database, folder)
    if (folder / source.path).is_file():  # also one whose name is a pattern
        return [folder / source.path]
    found = sorted(folder / each for each in glob.glob(source.path, root_dir=folder, recursive=True))  # noqa: PTH207 - may be absolute
    if not found:
        raise PipelineError(f"{PLACE}.path = {source.path!r}: no such file in {folder}: correct the path")
    return found


def source_digest(source: Source, files: Sequence[Path], folder: Path) -> str:
    """Digest of what a source holds. files: of `source_files`. Raises PipelineError."""
    try:
        if isinstance(source, DatabaseSource):
            return database_digest(source.database, folder)
        return digest_of([file_sha256(path) for path in files])
    except OSError as error:
        raise PipelineError(f"{PLACE}: {error.filename} can't be read ({error.strerror}): correct the path") from None


def source_slice(pipeline: Pipeline) -> dict[str, Any]:
    """Settings that affect the rows of a source and their batches."""
    values = ordered(pipeline.source.model_dump(mode="json", exclude={"path", "database"}))
    return {"source": values, "key": pipeline.key, "batch_rows": pipeline.batch_rows}


class Unchanged:
    """Notices a change of files since before their digests were computed."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._before = {path: self._state(path) for path in files}

    def require(self, files: Sequence[Path]) -> None:
        """Raise PipelineError if one of these files has changed."""
        for path in files:
            if self._state(path) != self._before[path]:
                raise PipelineError(f"{path} changed while it was read: run the same command again")

    def _state(self, path: Path) -> tuple[int, int] | None:
        """Size and time; None if there is nothing in it: readers make empty logs of databases, too."""
        try:
            found = path.stat()
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns) if found.st_size else None


class ParquetReader:
    """Reads Parquet files."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str], batch_rows: int) -> None:
        self._files, self._batch_rows = files, batch_rows
        self.rows: int | None = 0
        schemas = []
        for path in files:
            with self._opened(path) as file:
                missing = [column for column in columns if column not in file.schema_arrow.names]
                if missing:
                    raise PipelineError(f"{PLACE}.columns: {path} has no column {missing[0]}")
                names = file.schema_arrow.names
                require_distinct([each for each in names if not columns or each in columns], f"{PLACE}: {path}")
                found = [file.schema_arrow.field(name) for name in columns or names]
                schemas.append(plain(pa.schema(found), f"{PLACE}: {path}"))
                self.rows += file.metadata.num_rows
            if schemas[-1] != schemas[0]:
                raise PipelineError(f"{PLACE}: {path} has other columns or types than {files[0]}: read them apart")
        self.schema = schemas[0]

    def batches(self, cursor: Any) -> Iterator[Batch]:
        """See Reader."""
        begin, skipped = cursor or (0, 0)
        for number, path in enumerate(self._files[begin:], begin):
            done = 0
            try:
                with self._opened(path) as file:
                    for batch in file.iter_batches(self._batch_rows, columns=self.schema.names):
                        batch.validate(full=True)  # texts may be no UTF-8
                        done += batch.num_rows
                        if number > begin or done > skipped:
                            table = pa.Table.from_batches([batch]).select(self.schema.names).cast(self.schema)
                            yield Batch(table, [number, done])
            except (pa.ArrowException, OSError) as error:
                raise PipelineError(
                    f"{PLACE}: {path} can't be read behind row {done}: {one_line(error)}: replace the file"
                ) from None

    def _opened(self, path: Path) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise PipelineError(f"{PLACE}: {path} is no Parquet file: {one_line(error)}: replace the file") from None


class _JsonlReader:
    def __init__(self, source: JsonlSource, files: Sequence[Path], batch_rows: int) -> None:
        self._source, self._files, self._batch_rows = source, files, batch_rows
        self.schema = schema_of(source.columns, f"{PLACE}.columns")
        self.rows: int | None = None
        for path in files:
            try:
                with path.open("rb") as file:
                    begin = file.read(6)
            except OSError as error:
                raise PipelineError(f"{PLACE}: {path} can't be read ({error.strerror}): correct the path") from None
            other = next((name for mark, name in _NO_TEXT.items() if begin.startswith(mark)), None)
            if other is not None:
                raise PipelineError(f"{PLACE}: {path} is {other}: write it as UTF-8 text, uncompressed")

    def batches(self, cursor: Any) -> Iterator[Batch]:
        begin, offset, line = cursor or (0, 0, 0)
        for number, path in enumerate(self._files[begin:], begin):
            start, read = (offset, line) if number == begin else (0, 0)
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    while lines := [each for _, each in zip(range(self._batch_rows), file, strict=False)]:
                        start += sum(map(len, lines))
                        batch = self._batch(path, read + 1, lines)
                        read += len(lines)
                        batch.cursor = [number, start, read]
                        yield batch
            except OSError as error:
                raise PipelineError(f"{PLACE}: {path} can't be read ({error.strerror}): correct the path") from None

    def _batch(self, path: Path, first: int, lines: Sequence[bytes]) -> Batch:
        rows, places, dropped = [], [], Counter[str]()
        for number, line in enumerate(lines, first):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no JSON object")
                rows.append(row)
                places.append(f"{path} line {number}")
            except (ValueError, RecursionError) as error:
                self._refuse(f"{path} line {number}", error, dropped)
        try:
            table = self._table(rows)
        except UNFIT:
            kept = []
            for row, place in zip(rows, places, strict=True):
                try:
                    kept.append(self._table([row]))
                except UNFIT as error:
                    self._refuse(place, f"{self._unfit(row)}: {one_line(error)}", dropped)
            table = pa.concat_tables(kept) if kept else self.schema.empty_table()
        return Batch(table, None, dropped)

    def _table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        return pa.table([_column(each, [row.get(each.name) for row in rows]) for each in self.schema], self.schema)

    def _unfit(self, row: Mapping[str, Any]) -> str:
        """The first value of a row that has another type."""
        for each in self.schema:
            try:
                _column(each, [row.get(each.name)])
            except UNFIT:
                return f"{each.name} = {row.get(each.name)!r:.{SHOWN}} is no {self._source.columns[each.name]}"
        raise AssertionError("a value is unfit")

    def _refuse(self, place: str, fault: object, dropped: Counter[str]) -> None:
        if self._source.on_error == "fail":
            raise PipelineError(f"{place}: {fault}: correct the line, or set source.on_error to drop")
        dropped["unreadable"] += 1


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    if pa.types.is_string(field.type):
        values = [
            each if each is None or isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values
        ]
    return array_of(values, field.type)


class _DatabaseReader:
    def __init__(self, source: DatabaseSource, batch_rows: int, folder: Path) -> None:
        self._source, self._batch_rows, self._folder = source, batch_rows, folder
        self.schema = schema_of(source.columns, f"{PLACE}.columns")
        self.rows: int | None = None

    def batches(self, cursor: Any) -> Iterator[Batch]:
        source, key = self._source, quoted(self._source.database, self._source.key)
        names = ", ".join(quoted(source.database, name) for name in source.columns)
        connection = Connection(source.database, self._folder, PLACE, one_snapshot=True)
        table_name = quoted(source.database, source.table)
        try:
            while True:
                after = f"WHERE {key} > ? " if cursor is not None else ""
                rows = connection.query(
                    f"SELECT {names} FROM {table_name} {after}ORDER BY {key} LIMIT {self._batch_rows + 1}",
                    [] if cursor is None else [cursor],
                )
                if not rows:
                    if connection.query(f"SELECT 1 FROM {table_name} WHERE {key} IS NULL LIMIT 1", []):
                        raise self._unfit_key()
                    return
                table = table_of_rows(rows, self.schema, PLACE, source.key)
                keys = table.column(source.key).to_pylist()  # one more than the page, which must differ from its last
                # the last key again: its type in columns altered it, so the next query would find it for ever
                if None in keys or len({cursor, *keys}) != len(keys) + 1 or not isinstance(keys[-1], int | str):
                    raise self._unfit_key()
                table = table.slice(0, self._batch_rows)
                cursor = keys[table.num_rows - 1]
                yield Batch(table, cursor)
        finally:
            connection.close()

    def _unfit_key(self) -> PipelineError:
        return PipelineError(
            f"{PLACE}.key = {self._source.key!r}: it has nulls, equal values, or values that are neither integers nor"
            " texts: name a unique column, with its type in columns"
        )


def table_of_rows(rows: Sequence[Sequence[Any]], schema: pa.Schema, place: str, key: str) -> pa.Table:
    """Table of a database's rows. Raises PipelineError that names key, column and value of one that does not fit."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    try:
        return pa.table([array_of(column, each.type) for column, each in zip(columns, schema, strict=True)], schema)
    except UNFIT:
        for row in rows:
            for each, value in zip(schema, row, strict=True):
                try:
                    array_of([value], each.type)
                except UNFIT:
                    raise PipelineError(
                        f"{place}: the row with {key.strip()} {row[schema.names.index(key)]!r:.{SHOWN}} has {each.name}"
                        f" = {value!r:.{SHOWN}}, which is no {each.type}: correct the type in columns"
                    ) from None
        raise SchemaError(f"{place}: its rows do not fit {schema}") from None
