"""Parts of an artifact in the making: tables of finished pieces of its work, so that a killed process repeats only the
others.

    artifacts/<kind>/<action key>/parts/<name>     one object: digest of its key and tables, then the tables

Created exclusively, like everything in a store. Their writer discards them once the artifact is committed. What a
killed one left is removed with its stage if the artifact exists, else by `store gc`, as any attempt without a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from contracts.digests import sha256
from contracts.errors import ArtifactMissing
from contracts.store import Store

FOLDER = "parts"
"""Takes the place of an attempt's name, which has twelve hex digits."""
READERS = 16
"""Parts read at once, since a remote store answers in tens of milliseconds."""
_DIGEST = 64


class Parts:
    """Parts of one artifact. Its methods access the store: call them off the event loop."""

    def __init__(self, store: Store, kind: str, key: str, schemas: Iterable[pa.Schema] = ()) -> None:
        """schemas: of the tables of every part."""
        self._store, self._prefix, self._schemas = store, f"artifacts/{kind}/{key}/{FOLDER}/", list(schemas)

    def names(self) -> list[str]:
        """Names of the parts, sorted."""
        return [key.removeprefix(self._prefix) for key in self._store.list(self._prefix)]

    def get(self, name: str) -> list[pa.Table] | None:
        """Tables of a part; None if there is none. Removes a damaged one as `read` does."""
        return self._read(self._prefix + name)

    def add(self, name: str, tables: Sequence[pa.Table]) -> None:
        """Commit a part, unless it exists."""
        sink = pa.BufferOutputStream()
        for table in tables:
            with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
                stream.write_table(table)
        key, body = self._prefix + name, sink.getvalue().to_pybytes()
        self._store.create(key, _seal(key, body) + body)

    def read(self) -> dict[str, list[pa.Table]]:
        """Tables of every part by name. Removes a damaged part, or one with other schemas: its work is done again."""
        keys = self._store.list(self._prefix)
        with ThreadPoolExecutor(READERS) as pool:
            found = zip(keys, pool.map(self._read, keys), strict=True)
            return {key.removeprefix(self._prefix): tables for key, tables in found if tables is not None}

    def discard(self) -> None:
        """Remove all parts."""
        self._store.discard(self._prefix)

    def _read(self, key: str) -> list[pa.Table] | None:
        try:
            data = self._store.get(key)
        except ArtifactMissing:
            return None
        tables = _unpack(key, data)
        if [table.schema for table in tables] == self._schemas:
            return tables
        self._store.delete(key)
        return None


def _unpack(key: str, data: bytes) -> list[pa.Table]:
    """Tables of a part; none if it is damaged or belongs elsewhere."""
    if data[:_DIGEST] != _seal(key, data[_DIGEST:]):
        return []
    source, tables = pa.BufferReader(data[_DIGEST:]), []
    while source.tell() < source.size():
        with pa.ipc.open_stream(source) as stream:
            tables.append(stream.read_all())
    return tables


def _seal(key: str, body: bytes) -> bytes:
    return sha256(key.encode() + b"\n" + body).encode()
