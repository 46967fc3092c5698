"""Maintenance of a store: check that all files of manifests exist, and find files that no manifest names.

check_store -> Fault ...        every manifest, and every file that it names, read where it is
find_garbage -> Garbage ...     old attempts that no manifest names, old uploads that did not end, what dead processes
                                staged
remove_garbage                  asks once more before it removes: what a manifest names by now stays
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from contracts.artifacts import MANIFEST, Artifact, FileEntry, find_artifact
from contracts.attempts import read_note
from contracts.errors import ArtifactCorrupt, ArtifactMissing, SchemaError
from contracts.leftovers import leftovers, sweep_leftover
from contracts.owned import fate_of_owner
from contracts.store import STAGE, Store
from contracts.store_entries import Entry, Upload

OLD_S = 24 * 3600.0
"""Age of garbage: no writer takes this long between its first file and its manifest."""
READERS = 8

OnBytes = Callable[[int, int], None]
"""Callback with (checked bytes, total bytes)."""


@dataclass(frozen=True)
class Fault:
    """A missing or damaged object that a manifest requires."""

    place: str
    """Path of the manifest or file, relative to the store."""
    fault: str


@dataclass(frozen=True)
class Garbage:
    """Files that take space and are not needed."""

    what: Literal["attempt", "upload", "staging"]
    """attempt: files of an uncommitted attempt. upload: parts of an unfinished upload. staging: files of a process that
    has ended.
    """
    place: str
    """Key prefix, key, or path."""
    size: int | None
    """Size in bytes; None if the store does not report it."""
    age_s: float
    """Seconds since the last change."""
    upload: Upload | None = None


@dataclass(frozen=True)
class Checked:
    """Result of `check_store`."""

    artifacts: int
    files: int
    size: int
    """Number of bytes read."""
    faults: list[Fault]


def check_store(store: Store, progress: OnBytes = lambda done, total: None) -> Checked:
    """Read every manifest and every file. Raises StoreError if the store can't be read."""
    sizes = {entry.key: entry.size for entry in store.entries("artifacts/")}
    faults: list[Fault] = []
    promised: list[tuple[str, FileEntry]] = []
    artifacts = 0
    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(lambda folder: _open(store, folder), sorted(_manifests(sizes))):
            if isinstance(found, Fault):
                faults.append(found)
                continue
            artifacts += 1
            folder = f"{found.ref.uri}/{found.manifest.attempt}"
            promised += [(f"{folder}/{entry.path}", entry) for entry in found.manifest.files]
        total, done = sum(entry.size for _, entry in promised), 0
        checks = pool.map(lambda each: _check_file(store, each[0], each[1], sizes.get(each[0])), promised)
        for (_, entry), fault in zip(promised, checks, strict=True):
            done += entry.size
            progress(done, total)
            if fault is not None:
                faults.append(fault)
    return Checked(artifacts, len(promised), total, faults)


def find_garbage(store: Store, older_than_s: float = OLD_S) -> list[Garbage]:
    """Garbage that may be removed. older_than_s: minimum age, since live writers have uncommitted files, too."""
    now = time.time()
    uploads = (Garbage("upload", each.key, None, now - each.started_unix, each) for each in store.uploads())
    old = [each for each in (*_attempts(store, now), *uploads) if each.age_s > older_than_s]
    return [*_staged(store, now), *old]


def remove_garbage(store: Store, garbage: Garbage) -> bool:
    """Remove garbage. Returns False, and keeps it, if a manifest names it now."""
    if garbage.what == "staging":
        sweep_leftover(Path(garbage.place), store)
    elif garbage.upload is not None:
        store.abort(garbage.upload)
    else:
        _, kind, key, attempt, _ = garbage.place.split("/")
        if garbage.place in _at_work(store) or _is_named(store, kind, key, attempt):
            return False
        store.discard(garbage.place)
    return True


def _staged(store: Store, now: float) -> Iterator[Garbage]:
    """Files of dead processes in the store's scratch space."""
    for path in leftovers(store):
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        try:
            sizes = [each.lstat().st_size for each in files if each.is_file()]
            yield Garbage("staging", str(path), sum(sizes), now - path.lstat().st_mtime)
        except FileNotFoundError:
            continue  # the next run on its machine was first


def _manifests(keys: dict[str, int]) -> Iterator[str]:
    """Folders with a manifest."""
    for key in keys:
        parts = key.split("/")
        if len(parts) == 4 and parts[3] == MANIFEST:
            yield "/".join(parts[:3])


def _open(store: Store, folder: str) -> Artifact | Fault:
    _, kind, key = folder.split("/")
    place = f"{folder}/{MANIFEST}"
    try:
        found = find_artifact(store, kind, key)
    except (ArtifactCorrupt, SchemaError) as error:
        return Fault(place, str(error).removeprefix(f"{place} "))
    return found or Fault(place, "was removed while this was running")


def _check_file(store: Store, key: str, entry: FileEntry, size: int | None) -> Fault | None:
    if size is None:
        return Fault(key, "is gone")
    if size != entry.size:
        return Fault(key, f"has {size} bytes in the place of {entry.size}")
    try:
        same = store.checksum(key) == entry.sha256
    except ArtifactMissing:
        return Fault(key, "is gone")
    return None if same else Fault(key, "has other bytes than were committed")


def _attempts(store: Store, now: float) -> Iterator[Garbage]:
    """Attempts that no manifest names, and that no process of this machine is writing."""
    at_work = _at_work(store)
    entries = [entry for entry in store.entries("artifacts/") if len(entry.key.split("/")) > 4]
    for folder, group in groupby(entries, key=lambda entry: entry.key.split("/")[:4]):
        _, kind, key, attempt = folder
        files: list[Entry] = list(group)
        age = now - max(entry.modified_unix for entry in files)
        place = "/".join(folder) + "/"
        if place not in at_work and not _is_named(store, kind, key, attempt):
            yield Garbage("attempt", place, sum(entry.size for entry in files), age)


def _at_work(store: Store) -> set[str]:
    """Attempts of living processes of this machine: age tells nothing after a jump of the clock, or a suspension."""
    stages = [each for each in store.scratch.iterdir() if fate_of_owner(each.name, STAGE) == "alive"]
    notes = [note for stage in stages if (note := read_note(stage)) is not None and note.store == store.url]
    return {f"{note.folder}/{note.attempt}/" for note in notes}


def _is_named(store: Store, kind: str, key: str, attempt: str) -> bool:
    """Whether the manifest names the attempt; True if the manifest can't be read."""
    try:
        winner = find_artifact(store, kind, key)
    except (ArtifactCorrupt, SchemaError):
        return True
    return winner is not None and winner.manifest.attempt == attempt
