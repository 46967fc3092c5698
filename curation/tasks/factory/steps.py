"""Results of steps, kept in the store by the digest of what they depend on."""

from __future__ import annotations

import json
import zlib
from typing import Any

from contracts.digests import digest_of
from contracts.errors import ArtifactMissing
from contracts.store import Store

FACTORY_VERSION = "16"
"""Bump if a step gives another result for the same inputs."""


def step_key(step: str, inputs: Any) -> str:
    """Store key of the result of a step."""
    key = digest_of({"step": step, "inputs": inputs, "version": FACTORY_VERSION})
    return f"factory/{step}/{key[:2]}/{key}.json.z"


def recall_bytes(store: Store, key: str) -> bytes | None:
    """Stored bytes, or None."""
    try:
        return store.local_path(key).read_bytes()
    except (ArtifactMissing, FileNotFoundError):
        return None


def recall(store: Store, key: str) -> Any | None:
    """Stored result, or None if it is missing or unreadable (it is then made again)."""
    data = recall_bytes(store, key)
    try:
        return None if data is None else json.loads(zlib.decompress(data))
    except (zlib.error, ValueError):
        store.forget(key)
        return None


def record(store: Store, key: str, result: Any) -> Any:
    """Store a result. Returns the one that counts, which may be another process's."""
    if store.create(key, zlib.compress(json.dumps(result, sort_keys=True).encode()), cached=True):
        return result
    found = recall(store, key)
    return result if found is None else found
