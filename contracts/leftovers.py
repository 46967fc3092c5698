"""Find and remove what killed processes left in a store: stages, incomplete copies, files of uncommitted attempts.

Only abandoned files are removed: their process ran on this machine and has ended, or they are from elsewhere and a day
old. An attempt with all files in the store is completed, which is safe even if its writer's last request is still on
its way; the files of other attempts are removed. Safe to run concurrently, also with writers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from contracts.artifacts import MANIFEST, Manifest, find_artifact
from contracts.attempts import AttemptNote, read_note, read_seal
from contracts.errors import ArtifactCorrupt, SchemaError
from contracts.filecache import PARTIAL
from contracts.owned import ABANDONED_S, is_leftover, remove
from contracts.parts import Parts
from contracts.store import STAGE, Store


def sweep_leftovers(store: Store) -> None:
    """Remove leftovers of dead processes. Raises StoreError."""
    for entry in leftovers(store):
        sweep_leftover(entry, store)


def leftovers(store: Store) -> list[Path]:
    """Files and folders in the store's scratch space that dead processes left, sorted."""
    return list(_abandoned(store.scratch))


def sweep_leftover(entry: Path, store: Store) -> None:
    """Complete or remove one of `leftovers`. Raises StoreError."""
    if entry.name.startswith(STAGE):
        _sweep_stage(entry, store)
    else:
        remove(entry)


def sweep_once(store: Store) -> None:
    """Call `sweep_leftovers` once per process and store."""
    done = _swept(store.url)
    if not done:
        done.append(None)
        sweep_leftovers(store)


@functools.lru_cache(maxsize=64)
def _swept(url: str) -> list[None]:
    return []


def _abandoned(scratch: Path) -> Iterator[Path]:
    now = time.time()
    for entry in sorted(scratch.iterdir()):
        try:
            age = now - entry.lstat().st_mtime
        except FileNotFoundError:
            continue
        if is_leftover(entry.name, age, STAGE, PARTIAL, ""):
            yield entry


def _sweep_stage(stage: Path, store: Store) -> None:
    note = read_note(stage)
    if note is not None and note.store != store.url:
        if time.time() - stage.lstat().st_mtime < ABANDONED_S:
            return  # the attempt belongs to another store, whose users settle it
    elif note is not None:
        _settle(note, read_seal(stage), store)
    remove(stage)


def _settle(note: AttemptNote, manifest: bytes | None, store: Store) -> None:
    """Complete an attempt if all its files are there; else remove them unless they became the artifact, which needs no
    parts any more.
    """
    if manifest is not None and _is_whole(manifest, note, store):
        store.create(f"{note.folder}/{MANIFEST}", manifest)
    _, kind, key = note.folder.split("/")
    try:
        winner = find_artifact(store, kind, key)
    except (ArtifactCorrupt, SchemaError):
        return  # unreadable manifest: keep the files; readers report the damage
    if winner is None or winner.manifest.attempt != note.attempt:
        store.discard(f"{note.folder}/{note.attempt}/")
    if winner is not None:
        Parts(store, kind, key).discard()


def _is_whole(manifest: bytes, note: AttemptNote, store: Store) -> bool:
    """Whether the manifest is complete and all its files still exist with their sizes."""
    try:
        promised = Manifest.model_validate_json(manifest).files
    except ValidationError:
        return False
    folder = f"{note.folder}/{note.attempt}"
    there = {entry.key: entry.size for entry in store.entries(f"{folder}/")}
    return all(there.get(f"{folder}/{entry.path}") == entry.size for entry in promised)
