"""Artifacts: immutable groups of files with a manifest that is written last.

    artifacts/<kind>/<action key>/<attempt>/...files        any number of attempts, at most one survives
    artifacts/<kind>/<action key>/manifest.json             created exclusively; names the attempt that won

Equal action keys mean equal work: call `find_artifact` before the work, `ArtifactWriter.commit` after it. A second
writer adopts the result of the first.
"""

from __future__ import annotations

import functools
import os
import platform
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from contracts.attempts import note_attempt, seal_attempt
from contracts.digests import canonical_json, digest_of, file_sha256, has_sha256, sha256, table_digest
from contracts.errors import ArtifactCorrupt, ArtifactMissing, SchemaError, StoreError
from contracts.failpoints import failpoint
from contracts.store import LocalStore, Store, scratch_directory, staging_errors
from contracts.store_entries import check_key
from contracts.tensor_files import INDEX
from contracts.upgrades import absent_columns, meta_of, with_absent

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_AGAIN = "delete the artifact's folder and run its step again"
_READERS, _READ_AHEAD = 8, 32


class Frozen(BaseModel):
    """Base class of models on disk: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(Frozen):
    """Reference that steps exchange instead of data: location and digest of an artifact."""

    kind: str
    key: str
    """Action key, 64 hex digits."""
    digest: str
    """Content digest, 64 hex digits."""

    @property
    def uri(self) -> str:
        """The artifact's folder, relative to its store."""
        return f"artifacts/{self.kind}/{self.key}"

    @property
    def short(self) -> str:
        """Twelve digits of the content digest, for display."""
        return self.digest[:12]


class FileEntry(Frozen):
    """One file of an artifact."""

    path: str
    size: int
    """Bytes."""
    sha256: str
    digest: str | None
    """Digest that enters the content digest. None for telemetry, and for parts of tensors, whose index has it."""


class Manifest(Frozen):
    """Content of `manifest.json`. The artifact exists if and only if this file does."""

    kind: str
    schema_version: int
    action_key: str
    content_digest: str
    attempt: str
    files: list[FileEntry]
    parents: dict[str, ArtifactRef]
    """By role, e.g. {"policy": ...}."""
    config: dict[str, Any]
    """The step's own slice of the experiment."""
    code_version: str
    meta: dict[str, Any]
    """Small facts that are readable without opening a file."""
    tool_versions: dict[str, str]
    created_unix: float


def content_digest(kind: str, schema_version: int, files: Sequence[FileEntry]) -> str:
    """Content digest of an artifact with these files; telemetry does not count.

    The index of tensors in parts counts under the name of their single file: the digest is that of the uncut tensors.
    """
    content = {_content_name(entry.path): entry.digest for entry in files if entry.digest is not None}
    return digest_of({"kind": kind, "schema_version": schema_version, "files": content})


def _content_name(path: str) -> str:
    return path.removesuffix(INDEX) if path.endswith(f".safetensors{INDEX}") else path


class Artifact:
    """Committed artifact, opened for reading. The first use of a file checks it against the manifest."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    @property
    def ref(self) -> ArtifactRef:
        """Reference to this artifact."""
        return ArtifactRef(kind=self.manifest.kind, key=self.manifest.action_key, digest=self.manifest.content_digest)

    @property
    def uri(self) -> str:
        """See ArtifactRef.uri."""
        return f"artifacts/{self.manifest.kind}/{self.manifest.action_key}"

    @property
    def meta(self) -> dict[str, Any]:
        """Small facts of the manifest, with defaults for facts that old manifests lack."""
        return meta_of(self.manifest.kind, self.manifest.meta)

    def names(self) -> list[str]:
        """Paths of all files, sorted."""
        return sorted(entry.path for entry in self.manifest.files)

    def path(self, name: str) -> Path:
        """Path of a verified local file.

        Raises ArtifactMissing for an unknown name, ArtifactCorrupt if its bytes have changed.
        """
        entry = next((entry for entry in self.manifest.files if entry.path == name), None)
        if entry is None:
            raise ArtifactMissing(f"{self.ref.uri} has no file {name}: it holds {', '.join(self.names())}")
        key = f"{self.ref.uri}/{self.manifest.attempt}/{name}"
        try:
            path = self.store.local_path(key)
            if not (intact := _is_intact(path, entry)) and self.store.forget(key):
                path = self.store.local_path(key)
                intact = _is_intact(path, entry)
        except ArtifactMissing:
            raise ArtifactCorrupt(f"{self.ref.uri}/{name} is listed in its manifest but missing: {_AGAIN}") from None
        except OSError as error:
            raise StoreError(
                f"{self.ref.uri}/{name} can't be read ({error.strerror}): check the permissions and the disk of"
                f" {self.store.url}"
            ) from None
        if not intact:
            raise ArtifactCorrupt(f"{self.ref.uri}/{name} does not match its manifest (truncated or changed): {_AGAIN}")
        return path

    def directory(self) -> Path:
        """Local directory with all files, verified, for an engine or `from_pretrained`."""
        paths = [self.path(name) for name in self.names()]
        return paths[0].parents[len(Path(self.names()[0]).parts) - 1]

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Parquet file as a table; columns missing in old files are null.

        Raises ArtifactCorrupt if it is not a Parquet file with these columns.
        """
        path = self.path(name)
        try:
            absent = absent_columns(self.manifest.kind, name, pq.read_schema(path).names, columns or ())
            if columns is None:
                return with_absent(pq.read_table(path), absent)
            there = pq.read_table(path, columns=[column for column in columns if column not in absent])
            return with_absent(there, {column: absent[column] for column in columns if column in absent}).select(
                columns
            )
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(name, "a Parquet file with these columns", error) from None

    def batches(self, name: str, columns: list[str], rows: int = 256) -> Iterator[pa.RecordBatch]:
        """Parquet file in batches of at most `rows`, in order; columns missing in old files are null.

        Reads ahead a few MiB, whatever the size of the file and of its row groups. Raises ArtifactCorrupt if it is not
        a Parquet file with these columns.
        """
        path = self.path(name)
        try:
            with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
                absent = absent_columns(self.manifest.kind, name, file.schema_arrow.names, columns)
                present = [column for column in columns if column not in absent]
                missing = [column for column in present if column not in file.schema_arrow.names]
                if missing:
                    raise pa.ArrowInvalid(f"it has no column {missing[0]}")
                for batch in file.iter_batches(rows, columns=present):
                    yield from with_absent(pa.Table.from_batches([batch]), absent).select(columns).to_batches()
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(name, "a Parquet file with these columns", error) from None

    def json(self, name: str) -> Any:
        """Parsed JSON file. Raises ArtifactCorrupt if it is not JSON."""
        import json

        try:
            return json.loads(self.path(name).read_bytes())
        except ValueError as error:
            raise self._unreadable(name, "JSON", error) from None

    def _unreadable(self, name: str, what: str, fault: object) -> ArtifactCorrupt:
        """Error for a file that matches its manifest but can't be read."""
        said = " ".join(str(fault).split())[:200]
        return ArtifactCorrupt(f"{self.ref.uri}/{name} is not {what} ({said}): {_AGAIN}")


def artifact_exists(store: Store, kind: str, key: str) -> bool:
    """Whether an artifact with the action key `key` is committed."""
    return store.exists(f"artifacts/{kind}/{key}/{MANIFEST}")


def find_artifact(store: Store, kind: str, key: str) -> Artifact | None:
    """The committed artifact of this action key, or None."""
    try:
        data = store.get(f"artifacts/{kind}/{key}/{MANIFEST}")
    except ArtifactMissing:
        return None
    return Artifact(store, _read_manifest(data, kind, key))


def _read_manifest(data: bytes, kind: str, key: str) -> Manifest:
    """Manifest at this place.

    Raises ArtifactCorrupt if it was damaged, changed or moved, SchemaError if it has another version.
    """
    where = f"artifacts/{kind}/{key}/{MANIFEST}"
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        manifest = _explained(data, where)
    _require_version(manifest.schema_version, where)
    named = content_digest(kind, SCHEMA_VERSION, manifest.files)
    if (manifest.kind, manifest.action_key, manifest.content_digest) != (kind, key, named):
        raise ArtifactCorrupt(f"{where} was changed: its digest does not match its content; {_AGAIN}")
    return manifest


def _explained(data: bytes, where: str) -> Manifest:
    """Manifest that the quick parser refuses: raises the reason, unless Python's parser accepts it."""
    import json

    try:
        values = json.loads(data)
        _require_version(values.get("schema_version") if isinstance(values, dict) else None, where)
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise ArtifactCorrupt(f"{where} is damaged ({error.error_count()} errors): {_AGAIN}") from None
    except ValueError as error:
        raise ArtifactCorrupt(f"{where} is damaged ({error}): {_AGAIN}") from None


def _require_version(version: object, where: str) -> None:
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise SchemaError(
            f"{where} has schema version {version}, this Triplane reads {SCHEMA_VERSION}: use the Triplane that"
            " wrote the store, or point TRIPLANE_STORE elsewhere"
        )


def open_artifact(store: Store, ref: ArtifactRef) -> Artifact:
    """Artifact of a reference. Raises ArtifactMissing, or ArtifactCorrupt if it has other content."""
    artifact = find_artifact(store, ref.kind, ref.key)
    if artifact is None:
        raise ArtifactMissing(
            f"store {store.url} has no {ref.uri}: materialize {ref.kind} again, or point TRIPLANE_STORE at the store"
            " that has it"
        )
    if artifact.manifest.content_digest != ref.digest:
        raise ArtifactCorrupt(
            f"{ref.uri} holds {artifact.ref.short}, not the requested {ref.short}: the reference comes from"
            " another store"
        )
    return artifact


def discard_artifact(store: Store, ref: ArtifactRef) -> None:
    """Remove an unreferenced artifact, e.g. a snapshot of a finished training.

    Its manifest goes first: after an interruption there is no artifact, and `store gc` removes the files.
    """
    store.delete(f"{ref.uri}/{MANIFEST}")
    failpoint("manifest-removed")
    store.discard(f"{ref.uri}/")


def list_artifacts(store: Store, kind: str | None = None) -> Iterator[Artifact]:
    """Every committed artifact, in order of kind and key."""
    for each in [kind] if kind else artifact_kinds(store):
        # on a disk, threads take longer to hand over an artifact than to read it
        found = _read_in_turn(store, each) if isinstance(store, LocalStore) else _read_ahead(store, each)
        yield from (artifact for artifact in found if artifact is not None)


def _read_in_turn(store: LocalStore, kind: str) -> Iterator[Artifact | None]:
    try:
        keys = sorted(os.listdir(f"{store.url}/artifacts/{kind}"))  # noqa: PTH208 - folders without a manifest may be empty
    except (FileNotFoundError, NotADirectoryError):
        return iter(())
    return (find_artifact(store, kind, key) for key in keys)


def _read_ahead(store: Store, kind: str) -> Iterator[Artifact | None]:
    """Artifacts of a remote store, which replies in tens of milliseconds: several are requested at once, but not all,
    since the caller may stop early.
    """
    keys = store.folders(f"artifacts/{kind}/")
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(keys), _READ_AHEAD):
            yield from pool.map(lambda key: find_artifact(store, kind, key), keys[start : start + _READ_AHEAD])


def artifact_kinds(store: Store) -> Sequence[str]:
    """Kinds of the artifacts of a store, sorted."""
    return store.folders("artifacts/")


class ArtifactWriter:
    """Stages files in a temporary directory and commits them as one artifact.

    with ArtifactWriter(store, "dataset", key, parents={...}, config={...}, code_version="1") as out:
        out.add_table("rows.parquet", table)
        artifact = out.commit(meta={"rows": table.num_rows})
    """

    def __init__(
        self,
        store: Store,
        kind: str,
        key: str,
        *,
        parents: Mapping[str, ArtifactRef],
        config: Mapping[str, Any],
        code_version: str,
    ) -> None:
        check_key(f"{kind}/{key}")
        self._store, self._kind, self._key = store, kind, key
        self._parents, self._config, self._code_version = dict(parents), dict(config), code_version
        self._digests: dict[str, str | None] = {}
        self._sha256: dict[str, str] = {}
        """Digests of files that were hashed while they were written."""
        self._stored: list[FileEntry] = []
        """Files that are in the store already."""
        self.digest = ""
        """Content digest of the files of this writer, which `commit` sets."""
        self._attempt = uuid.uuid4().hex[:12]
        self._uploading: str | None = None
        """Folder for files that no manifest can name yet."""
        self._stage = scratch_directory(store)
        self.directory = Path(self._stage.name)
        """Folder in which the caller may write files before naming them with `add_file`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._uploading is not None:
            with suppress(StoreError):  # the store is unreachable: `store gc` removes the files later
                self._store.discard(self._uploading)
        self._stage.cleanup()
        if isinstance(error, OSError):
            with staging_errors(self._store):
                raise error

    def add_table(self, name: str, table: pa.Table, *, telemetry: bool = False) -> None:
        """Write a Parquet file. telemetry: keep it outside the content digest (timings, costs, host names)."""
        pq.write_table(table, self.directory / name, compression="zstd")
        self._digests[name] = None if telemetry else table_digest(table)

    def add_json(self, name: str, value: Any, *, telemetry: bool = False) -> None:
        """Write canonical JSON. telemetry: see `add_table`."""
        self.add_bytes(name, canonical_json(value), telemetry=telemetry)

    def add_bytes(self, name: str, data: bytes, *, telemetry: bool = False) -> None:
        """Write raw bytes. telemetry: see `add_table`."""
        (self.directory / name).write_bytes(data)
        self._digests[name] = None if telemetry else sha256(data)

    def add_file(
        self, name: str, digest: str | None = None, *, sha256: str | None = None, telemetry: bool = False
    ) -> None:
        """Add a file that is already in `directory`. digest: of its content, if the file format adds framing
        (safetensors). sha256: of its bytes, if known. telemetry: see `add_table`.
        """
        if sha256 is not None:
            self._sha256[name] = sha256
        self._digests[name] = None if telemetry else digest or sha256 or file_sha256(self.directory / name)

    def open_attempt(self) -> str:
        """Folder in the store for files of the artifact that other processes put there, named by `add_stored`.

        It is removed unless this writer commits.
        """
        folder = f"artifacts/{self._kind}/{self._key}"
        if self._uploading is None:
            note_attempt(self.directory, self._store, folder, self._attempt)
            self._uploading = f"{folder}/{self._attempt}/"
        return f"{folder}/{self._attempt}"

    def add_stored(self, name: str, size: int, sha256: str, digest: str | None) -> None:
        """Add a file that is in the folder of `open_attempt`. size: bytes. digest: see `FileEntry`."""
        self._stored.append(FileEntry(path=name, size=size, sha256=sha256, digest=digest))

    def commit(self, meta: Mapping[str, Any] | None = None) -> Artifact:
        """Commit the staged files as an artifact.

        If an artifact of this key was committed meanwhile, drop this attempt and return the earlier one. Its digest
        differs from `digest` if equal work gave other bits.
        """
        attempt, folder = self._attempt, f"artifacts/{self._kind}/{self._key}"
        self.open_attempt()
        failpoint("artifact-staged")
        uploaded = [self._upload(f"{folder}/{attempt}", name) for name in sorted(self._digests)]
        entries = sorted([*uploaded, *self._stored], key=lambda entry: entry.path)
        self.digest = content_digest(self._kind, SCHEMA_VERSION, entries)
        manifest = Manifest(
            kind=self._kind,
            schema_version=SCHEMA_VERSION,
            action_key=self._key,
            attempt=attempt,
            files=entries,
            content_digest=self.digest,
            parents=self._parents,
            config=self._config,
            code_version=self._code_version,
            meta=dict(meta or {}),
            tool_versions=tool_versions(),
            created_unix=time.time(),
        )
        body = manifest.model_dump_json(indent=1).encode()
        seal_attempt(self.directory, body)
        self._uploading = None  # from here on the manifest may exist, even if the next call fails
        failpoint("before-manifest")
        won = self._store.create(f"{folder}/{MANIFEST}", body)
        failpoint("after-manifest")
        winner = Artifact(self._store, manifest) if won else find_artifact(self._store, self._kind, self._key)
        assert winner is not None, "a manifest that exists can be read"
        if winner.manifest.attempt != attempt:
            self._store.discard(f"{folder}/{attempt}/")
        return winner

    def _upload(self, folder: str, name: str) -> FileEntry:
        source = self.directory / name
        size, checksum = source.stat().st_size, self._sha256.get(name) or file_sha256(source)
        self._store.create_file(f"{folder}/{name}", source)
        return FileEntry(path=name, size=size, sha256=checksum, digest=self._digests[name])


@functools.cache
def tool_versions() -> dict[str, str]:
    """Versions of packages that affect an artifact's bytes. Recorded, but part of no digest."""
    found = {"python": platform.python_version()}
    for package in ("triplane", "torch", "pyarrow", "duckdb", "tokenizers", "dagster"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether the file has the committed bytes."""
    return path.stat().st_size == entry.size and has_sha256(path, entry.sha256)
