"""Arrow schemas of a pipeline's rows, from types in DuckDB's syntax."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from curation.errors import PipelineError

_KINDS = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal128,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)
"""Types that an artifact can hold, beside lists and structs of them."""
UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""What `array_of` raises for a value of another type."""


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Arrow array of Python values. Raises one of UNFIT for a value that pyarrow refuses, or would alter."""
    _require_exact(values, kind)
    return pa.array(values, kind)


def schema_of(types: Mapping[str, str], place: str) -> pa.Schema:
    """Schema of columns with these types in DuckDB's syntax. Raises PipelineError."""
    return pa.schema([pa.field(name, _type_of(text, f"{place}.{name}")) for name, text in types.items()])


def plain(schema: pa.Schema, place: str) -> pa.Schema:
    """Schema of types that Arrow and DuckDB share, without metadata, dictionaries, views and fixed sizes. Raises
    PipelineError for a type that an artifact can't hold.
    """
    return pa.schema([pa.field(each.name, _plain(each.type, f"{place}: column {each.name}")) for each in schema])


def with_columns(schema: pa.Schema, added: pa.Schema, dropped: tuple[str, ...] = ()) -> pa.Schema:
    """Schema with columns replaced in place, or appended, and others removed."""
    fields = {each.name: each for each in schema} | {each.name: each for each in added}
    return pa.schema([each for name, each in fields.items() if name not in dropped])


def set_columns(table: pa.Table, added: pa.Table, schema: pa.Schema) -> pa.Table:
    """Table of a schema whose columns are those of `added`, else those of `table`."""
    names = set(added.column_names)
    columns = [(added if name in names else table).column(name) for name in schema.names]
    return pa.table(columns, schema.names).cast(schema)


def require_columns(schema: pa.Schema, names: tuple[str, ...], place: str) -> None:
    """Raise PipelineError if a column is missing."""
    missing = next((name for name in names if name not in schema.names), None)
    if missing is not None:
        raise PipelineError(f"{place}: there is no column {missing}; at this stage there are {', '.join(schema.names)}")


def require_distinct(names: Iterable[str], place: str) -> None:
    """Raise PipelineError for equal names. DuckDB ignores their case."""
    known: dict[str, str] = {}
    for name in names:
        if name.lower() in known:
            raise PipelineError(
                f"{place}: the columns {known[name.lower()]} and {name} are the same one in SQL: rename one of them"
            )
        known[name.lower()] = name


def _require_exact(values: Iterable[Any], kind: pa.DataType) -> None:
    """Raise TypeError or ValueError for a value that pyarrow would alter."""
    given = [each for each in values if each is not None]
    types = set(map(type, given))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        for each in types:
            if issubclass(each, str | bytes | bytearray | Set):
                raise TypeError(f"{each.__name__} is no list")
        _require_exact([item for each in given for item in each], kind.value_type)
    elif pa.types.is_struct(kind):
        for each in types:
            if not issubclass(each, Mapping):
                raise TypeError(f"{each.__name__} is no struct")
        for child in kind:
            _require_exact([value.get(child.name) for value in given], child.type)
    elif pa.types.is_floating(kind) and bool in types:
        raise TypeError("bool is no number")
    elif (pa.types.is_integer(kind) or pa.types.is_temporal(kind)) and types - {int}:
        for value in given:
            if _is_cut(value, kind):
                raise ValueError(f"{value} would be cut to fit {kind}")


def _is_cut(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, datetime.datetime) and pa.types.is_timestamp(kind):
        return value.microsecond % {"s": 1_000_000, "ms": 1_000}.get(kind.unit, 1) != 0
    if isinstance(value, datetime.datetime):
        return pa.types.is_date(kind) and value.time() != datetime.time.min
    if isinstance(value, Decimal):
        return not value.is_finite() or value != value.to_integral_value()
    return isinstance(value, float | np.floating) and not float(value).is_integer()


def _type_of(text: str, place: str) -> pa.DataType:
    try:
        return _plain(_parsed(text), place)
    except duckdb.Error as error:
        said = str(error).splitlines()[0]
        raise PipelineError(f"{place} = {text!r}: {said}: write a type such as BIGINT, DOUBLE or VARCHAR[]") from None


@functools.cache
def _parsed(text: str) -> pa.DataType:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")  # not that of the machine
        return connection.sql(f"SELECT CAST(NULL AS {text}\n) AS x").to_arrow_table().schema.field("x").type


def _plain(kind: pa.DataType, place: str) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type, place)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_float16(kind):  # DuckDB has no such numbers
        return pa.float32()
    if pa.types.is_duration(kind):  # DuckDB cuts nanoseconds off; a cast refuses them
        return pa.duration("us")
    if pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type, place))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type, place))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _plain(each.type, place)) for each in kind])
    if not any(known(kind) for known in _KINDS):
        raise PipelineError(f"{place} has the type {kind}, which is not supported: cast it to another one")
    return kind
