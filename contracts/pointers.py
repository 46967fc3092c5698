"""Mutable names over immutable content: numbered files created exclusively; the highest number counts, the list is the history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from contracts.digests import canonical_json
from contracts.errors import ArtifactCorrupt
from contracts.store import Store


@dataclass(frozen=True)
class PointerEntry:
    """One value a pointer had. `number` counts from 1 without gaps."""

    number: int
    value: dict[str, Any]


class Pointer:
    """A named value with compare-and-swap and a full history, e.g. the live policy of an experiment."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._prefix = f"pointers/{name}/"

    def history(self) -> list[PointerEntry]:
        """Every value ever set, oldest first."""
        return [self._read(key) for key in sorted(self._store.list(self._prefix))]

    def current(self) -> PointerEntry | None:
        """The value that counts now, or None when the pointer was never set."""
        keys = sorted(self._store.list(self._prefix))
        return self._read(keys[-1]) if keys else None

    def advance(self, value: dict[str, Any], expected_number: int) -> bool:
        """Set `value` if the current number is still `expected_number` (0: never set). False when someone else was first."""
        return self._store.create(f"{self._prefix}{expected_number + 1:08d}.json", canonical_json(value))

    def _read(self, key: str) -> PointerEntry:
        try:
            return PointerEntry(int(key[len(self._prefix) : -len(".json")]), json.loads(self._store.get(key)))
        except ValueError as error:
            raise ArtifactCorrupt(
                f"pointer entry {key} is not readable ({error}): restore it from a backup of the store"
            ) from None
