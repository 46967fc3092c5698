"""Segments of the ledger: artifacts of kind `ledger`, each with the rows of consecutive updates.

    g0001-00000000-00000255    updates 0 to 255 of the first generation, merged
    g0001-00000256-00000256    update 256

An update is created exclusively, so of two concurrent ones the second starts again. 16 segments are merged into one,
and 16 of those again. A reader takes the widest segments; narrower ones that they cover are removed some time after
the merge. A rebuild writes a new generation, which replaces the older ones at once.
"""

from __future__ import annotations

import glob
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import MANIFEST, Artifact, ArtifactRef, ArtifactWriter, discard_artifact, find_artifact
from contracts.errors import ArtifactCorrupt, ArtifactMissing
from contracts.store import Store

KIND = "ledger"
VERSION = "1"
"""Version of the tables. Segments of another version are ignored, so that the ledger is rebuilt."""
MERGED = 16
"""Number of segments that are merged into one."""
FLUSH_ROWS = 100_000
"""Rows of a row group that a rebuild writes."""
READERS_S = 900.0
"""Seconds for which covered segments stay, since a reader may have begun with them."""
MEMORY = "1GB"
"""DuckDB's memory limit."""

_STRING, _COST = pa.string(), pa.float64()
TABLES: Mapping[str, pa.Schema] = {
    "artifacts": pa.schema(
        [
            ("uri", _STRING),
            ("kind", _STRING),
            ("digest", _STRING),
            ("experiment", _STRING),
            ("iteration", _STRING),
            ("rule", _STRING),
            ("created_unix", pa.float64()),
        ]
    ),
    "edges": pa.schema([("child", _STRING), ("parent", _STRING), ("role", _STRING)]),
    "episodes": pa.schema(
        [
            ("episode_id", pa.binary()),
            ("home", _STRING),
            ("group_id", _STRING),
            ("task_id", _STRING),
            ("image_digest", _STRING),
            ("outcome", _STRING),
            ("policy", _STRING),
            ("tools", pa.list_(_STRING)),
            ("policy_tokens", pa.int64()),
            ("engine_tokens", pa.int64()),
            ("seconds", _COST),
            ("sampling_seconds", _COST),
            ("tool_seconds", _COST),
        ]
    ),
    "grades": pa.schema(
        [
            ("episode_id", pa.binary()),
            ("home", _STRING),
            ("reward", pa.float32()),
            ("solved", pa.bool_()),
            ("verdict", _STRING),
        ]
    ),
    "members": pa.schema([("episode_id", pa.binary()), ("home", _STRING), ("kept", pa.bool_()), ("reason", _STRING)]),
}
"""Tables of a segment. `home`: URI of the artifact that holds the row. `rule`: code version and digest of the settings
of a `rewards` artifact, else null. `experiment`, `iteration`: of artifacts that name them in their config.
"""

Rows = Mapping[str, pa.Table]
"""A table for each of TABLES."""


@dataclass(frozen=True, order=True)
class Segment:
    """Updates `first` to `last` of a generation."""

    generation: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Key of the artifact."""
        return f"g{self.generation:04d}-{self.first:08d}-{self.last:08d}"


_KEY = re.compile(r"g(\d+)-(\d+)-(\d+)")


def segments_of(store: Store) -> list[Segment]:
    """All committed segments, covered ones included, sorted."""
    folder = f"artifacts/{KIND}/"
    keys = (key.removeprefix(folder).split("/") for key in store.list(folder))
    found = (_KEY.fullmatch(parts[0]) for parts in keys if parts[1:] == [MANIFEST])
    return sorted(Segment(*(int(number) for number in each.groups())) for each in found if each)


def generation_of(segments: Sequence[Segment]) -> int:
    """Number of the newest generation; 0 if there is none."""
    return max((each.generation for each in segments), default=0)


def widest(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that together cover the newest complete generation, in order; empty if there is none.

    Raises ArtifactCorrupt if updates are missing.
    """
    generation = max((each.generation for each in segments if each.first == 0), default=None)
    own = [each for each in segments if each.generation == generation]
    return _chain(own, 0, max(each.last for each in own)) if own else []


def _chain(segments: Sequence[Segment], first: int, last: int) -> list[Segment]:
    found: list[Segment] = []
    while first <= last:
        starting = [each for each in segments if each.first == first and each.last <= last]
        if not starting:
            raise ArtifactCorrupt(f"the ledger lacks its update {first}: run `triplane store reindex`")
        found.append(max(starting))
        first = found[-1].last + 1
    return found


class Ledger:
    """Reads a store's segments, of which merges may remove some at any time."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextmanager
    def opened(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, list[Segment]]]:
        """A connection with a view for each of TABLES, and the segments that they show."""
        for last in (False, False, True):
            found = widest(segments_of(self.store))
            try:
                parts = [_open(self.store, segment) for segment in found]
                break
            except ArtifactMissing:  # merged in the meantime
                if last:
                    raise
        if any(part.manifest.code_version != VERSION for part in parts):
            found, parts = [], []
        with duckdb.connect() as db:
            db.execute(f"SET memory_limit = '{MEMORY}'")
            for name, schema in TABLES.items():
                paths = [glob.escape(str(part.path(f"{name}.parquet"))) for part in parts]
                if paths:
                    db.read_parquet(paths).create_view(name)
                else:
                    db.register(name, schema.empty_table())
            yield db, found

    def append(self, after: Sequence[Segment], rows: Rows) -> bool:
        """Add the rows as the update that follows the segments `after`. Returns False if another writer was first."""
        number, generation = (after[-1].last + 1, after[-1].generation) if after else (0, 1)

        def write(folder: Path) -> None:
            for name in TABLES:
                pq.write_table(rows[name], folder / f"{name}.parquet", compression="zstd")

        if not self._commit(Segment(generation, number, number), write):
            return False
        self._merge(generation, number)
        return True

    def replace(self, write: Callable[[Path], None]) -> list[ArtifactRef] | None:
        """Begin a generation with the files that `write` puts into a folder. It replaces the older ones.

        Returns the artifacts that updates meanwhile added to an older generation and that the new one lacks; None, and
        changes nothing, if another writer was first.
        """
        before = segments_of(self.store)
        new = Segment(generation_of(before) + 1, 0, 0)
        if not self._commit(new, write):
            return None
        late = [each for each in segments_of(self.store) if each < new and each not in before]
        known = {row["uri"] for row in self._artifacts([new])} if late else set()
        lacking = [row for row in self._artifacts(late) if row["uri"] not in known]
        self._sweep()
        return [
            ArtifactRef(kind=row["kind"], key=row["uri"].rsplit("/", 1)[-1], digest=row["digest"]) for row in lacking
        ]

    def is_current(self, segments: Sequence[Segment]) -> bool:
        """Whether no other generation has replaced that of these segments."""
        return generation_of(segments_of(self.store)) == generation_of(segments)

    def _artifacts(self, segments: Sequence[Segment]) -> Iterator[dict[str, str]]:
        for segment in segments:
            yield from _open(self.store, segment).table("artifacts.parquet", ["uri", "kind", "digest"]).to_pylist()

    def _merge(self, generation: int, number: int) -> None:
        """Merge the segments that end at update `number`, if they complete a power of MERGED."""
        width = MERGED
        while (number + 1) % width == 0:
            span = Segment(generation, number + 1 - width, number)
            own = [each for each in segments_of(self.store) if each.generation == generation and each != span]
            narrow = [each for each in own if span.first <= each.first and each.last <= span.last]
            sources = [_open(self.store, each) for each in _chain(narrow, span.first, span.last)]

            def write(folder: Path, sources: Sequence[Artifact] = sources) -> None:
                with duckdb.connect() as db:
                    db.execute(f"SET memory_limit = '{MEMORY}'; SET threads = 1")
                    for name in TABLES:
                        files = [glob.escape(str(source.path(f"{name}.parquet"))) for source in sources]
                        db.read_parquet(files).write_parquet(str(folder / f"{name}.parquet"), compression="zstd")

            self._commit(span, write)
            width *= MERGED
        if width > MERGED:
            self._sweep()

    def _commit(self, segment: Segment, write: Callable[[Path], None]) -> bool:
        writer = uuid.uuid4().hex
        with ArtifactWriter(self.store, KIND, segment.key, parents={}, config={}, code_version=VERSION) as out:
            write(out.directory)
            for name in TABLES:
                out.add_file(f"{name}.parquet", telemetry=True)  # rows have costs and times
            return bool(out.commit(meta={"writer": writer}).meta["writer"] == writer)

    def _sweep(self) -> None:
        """Remove segments that wider ones or a newer generation cover, once no reader can have begun with them."""
        needed = {segment.key for segment in widest(segments_of(self.store))}
        for entry in self.store.entries(f"artifacts/{KIND}/"):
            folder, name = entry.key.rsplit("/", 1)
            key = folder.rsplit("/", 1)[-1]
            if name == MANIFEST and key not in needed and entry.modified_unix < time.time() - READERS_S:
                discard_artifact(self.store, ArtifactRef(kind=KIND, key=key, digest=""))


@contextmanager
def batched(folder: Path) -> Iterator[Callable[[Rows], None]]:
    """Writer of files for `Ledger.replace` that keeps at most FLUSH_ROWS rows in memory, and those of one call."""
    writers = {
        name: pq.ParquetWriter(folder / f"{name}.parquet", schema, compression="zstd")
        for name, schema in TABLES.items()
    }
    waiting: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    counts = dict.fromkeys(TABLES, 0)

    def flush(name: str) -> None:
        if waiting[name]:
            writers[name].write_table(pa.concat_tables(waiting[name]), row_group_size=FLUSH_ROWS)
            waiting[name].clear()
            counts[name] = 0

    def add(rows: Rows) -> None:
        for name, table in rows.items():
            if table.num_rows:
                waiting[name].append(table)
                counts[name] += table.num_rows
            if counts[name] >= FLUSH_ROWS:
                flush(name)

    try:
        yield add
        for name in TABLES:
            flush(name)
    finally:
        for writer in writers.values():
            writer.close()


def _open(store: Store, segment: Segment) -> Artifact:
    found = find_artifact(store, KIND, segment.key)
    if found is None:
        raise ArtifactMissing(f"ledger segment {segment.key} was removed: run `triplane store reindex`")
    return found
