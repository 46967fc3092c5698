"""Mutable names for immutable content: numbered files, created exclusively; the highest number holds the value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from contracts.digests import canonical_json
from contracts.errors import ArtifactCorrupt, ArtifactMissing
from contracts.store import Store

_FIRST = f"/{1:08d}.json"


@dataclass(frozen=True)
class PointerEntry:
    """One value of a pointer. `number` counts from 1 without gaps."""

    number: int
    value: dict[str, Any]


class Pointer:
    """Named value with compare-and-swap and a full history, e.g. the live policy of an experiment."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._prefix = f"pointers/{name}/"

    def history(self) -> list[PointerEntry]:
        """All values, oldest first."""
        return [self._read(key) for key in sorted(self._store.list(self._prefix))]

    def current(self) -> PointerEntry | None:
        """Current value, or None if the pointer was never set."""
        keys = sorted(self._store.list(self._prefix))
        return self._read(keys[-1]) if keys else None

    def is_set(self) -> bool:
        """Whether the pointer was ever set; one request."""
        return self._store.exists(self._key(1))

    def remove(self) -> None:
        """Remove all values, the newest first: after an interruption, the pointer still has an older value."""
        for key in sorted(self._store.list(self._prefix), reverse=True):
            self._store.delete(key)

    def current_of_few(self) -> PointerEntry | None:
        """Like `current`, for pointers that rarely have a second value: reads the first two numbers, since listing S3
        is slow.
        """
        first = self._find(1)
        return self.current() if first is not None and self._store.exists(self._key(2)) else first

    def current_since(self, number: int) -> PointerEntry | None:
        """Like `current`, for a caller that has seen this number: reads it and what follows, without listing."""
        entry = self._find(number) if number else None
        if entry is None:
            return self.current()
        while (following := self._find(entry.number + 1)) is not None:
            entry = following
        return entry

    def advance(self, value: dict[str, Any], expected_number: int) -> bool:
        """Set `value` if the current number is still `expected_number` (0: never set).

        Returns False if another writer was first.
        """
        return self._store.create(self._key(expected_number + 1), canonical_json(value))

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number:08d}.json"

    def _find(self, number: int) -> PointerEntry | None:
        try:
            return self._read(self._key(number))
        except ArtifactMissing:
            return None

    def _read(self, key: str) -> PointerEntry:
        try:
            return PointerEntry(int(key[len(self._prefix) : -len(".json")]), json.loads(self._store.get(key)))
        except ValueError as error:
            raise ArtifactCorrupt(f"pointer entry {key} is not readable ({error}): restore it from a backup") from None


def pointer_folders(store: Store, folder: str) -> list[str]:
    """Sorted names directly below `folder`, e.g. the partitions of an asset."""
    return [*store.folders(f"pointers/{folder}/")]


def changed_pointers(store: Store, folder: str) -> dict[str, PointerEntry]:
    """Current entries, by name, of the pointers directly below `folder` that have changed. Lists the store once."""
    prefix, latest = f"pointers/{folder}/", {}
    for key in store.list(prefix):
        latest[key.removeprefix(prefix).partition("/")[0]] = key
    found = {name: Pointer(store, f"{folder}/{name}") for name, key in latest.items() if not key.endswith(_FIRST)}
    return {name: entry for name, pointer in found.items() if (entry := pointer.current()) is not None}
