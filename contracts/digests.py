"""Digests of content: SHA-256 over canonical bytes, never over the framing of a file format.

Source of the canonical JSON form: RFC 8785 restricted to what we use (sorted keys, no white space, UTF-8; floats by
`repr`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.errors import SchemaError

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def sha256(data: bytes) -> str:
    """Hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_sha256(path: Path, expected: str) -> bool:
    """Whether a file has this SHA-256. An unchanged file is read once."""
    try:
        return _has_sha256(path, path.stat().st_mtime_ns, expected)
    except _Differs:
        return False


class _Differs(Exception):
    """Raised instead of a False result: the cache keeps no exceptions, so a repaired file is read again."""


@functools.lru_cache(maxsize=65_536)
def _has_sha256(path: Path, mtime_ns: int, expected: str) -> bool:
    """Return True if the file has this digest, else raise _Differs. mtime_ns: version of the file, for the cache."""
    if file_sha256(path) != expected:
        raise _Differs
    return True


def canonical_json(value: Any) -> bytes:
    """Serialize JSON-like `value` so that equal values give equal bytes.

    Raises SchemaError for NaN, infinity or foreign types.
    """
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(
            f"value has no canonical JSON form ({error}): pass only str, int, finite float, bool, None, list, dict"
        ) from None
    return text.encode()


def digest_of(value: Any) -> str:
    """Digest of a JSON-like value."""
    return sha256(canonical_json(value))


def action_key(step: str, inputs: Mapping[str, str], config: Mapping[str, Any], code_version: str) -> str:
    """Action key of a step: equal keys mean equal work.

    inputs: digests by role. config: only the step's OWN slice. code_version: raised by hand if the step computes
    something else.
    """
    return digest_of({"step": step, "inputs": dict(inputs), "config": dict(config), "code_version": code_version})


def tensors_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Digest over (name, dtype, shape, hex SHA-256 of the little-endian bytes) of each tensor, in order of name."""
    total = hashlib.sha256()
    for name, dtype, shape, data_sha256 in sorted(tensors, key=lambda item: item[0]):
        total.update(canonical_json([name, dtype, list(shape)]))
        total.update(bytes.fromhex(data_sha256))
    return total.hexdigest()


def table_digest(table: pa.Table) -> str:
    """Digest over a table's schema and values in row order; independent of chunking, compression, offsets and writer
    version.

    Field and schema metadata are left out. Nested lists and structs are walked column-wise.
    """
    total = hashlib.sha256()
    for field in table.schema:
        total.update(canonical_json([field.name, _type_name(field.type)]))
        _hash_array(total, table.column(field.name).combine_chunks())
    total.update(struct.pack("<q", table.num_rows))
    return total.hexdigest()


def _type_name(kind: pa.DataType) -> str:
    """A type's name without the names of list items, which Parquet changes."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {_type_name(field.type)}' for field in kind)}>"
    return str(kind)


def _hash_array(total: hashlib._Hash, array: pa.Array | pa.ChunkedArray) -> None:
    if isinstance(array, pa.ChunkedArray):
        array = (
            array.chunk(0)
            if array.num_chunks == 1
            else pa.concat_arrays(array.chunks)
            if array.num_chunks
            else pa.array([], array.type)
        )
    total.update(b"N" + np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        total.update(b"L" + np.ascontiguousarray(lengths, dtype="<i8").tobytes())
        _hash_array(total, array.flatten())
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            _hash_array(total, child)
    elif pa.types.is_dictionary(kind):
        _hash_array(total, array.dictionary_decode())
    elif (
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    ):
        if len(array):
            total.update(_with_lengths(array))
    elif pa.types.is_boolean(kind):
        total.update(b"B" + np.packbits(array.fill_null(False).to_numpy(zero_copy_only=False)).tobytes())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = array.fill_null(0).to_numpy(zero_copy_only=False)
        total.update(b"V" + np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).tobytes())
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        _hash_array(total, array.view(pa.int32() if kind.bit_width == 32 else pa.int64()))
    elif pa.types.is_decimal128(kind):
        filled = array.fill_null(pa.scalar(Decimal(0), kind))
        total.update(b"D" + np.frombuffer(filled.buffers()[1], "V16")[filled.offset :][: len(filled)].tobytes())
    elif pa.types.is_map(kind):
        raise SchemaError(f"map columns have no canonical order (column type {kind}): use list<struct<key, value>>")
    else:
        raise SchemaError(
            f"no canonical form for column type {kind}: use numbers, times, strings, binary, lists or structs"
        )


def _with_lengths(array: pa.Array) -> pa.Buffer:
    """Bytes of strings or binary values, each after its length (int64, little-endian); null is empty."""
    empty = b"" if array.type in (pa.binary(), pa.large_binary()) else ""
    data = array.fill_null(empty).cast(pa.large_binary())
    ends = np.frombuffer(data.buffers()[1], "<i8")[data.offset :][: len(data) + 1]
    sizes = pa.py_buffer(np.diff(ends).astype("<i8").tobytes())
    lengths = pa.Array.from_buffers(pa.binary(8), len(data), [None, sizes]).cast(pa.large_binary())
    return pc.binary_join_element_wise(lengths, data, pa.scalar(b"", pa.large_binary())).buffers()[2]
