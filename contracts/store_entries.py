"""Keys of a store, and what a store lists: shared by all implementations of `contracts.store`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from contracts.errors import StoreError

_KEY = re.compile(r"[A-Za-z0-9_.=@+-]+(/[A-Za-z0-9_.=@+-]+)*")


@dataclass(frozen=True)
class Entry:
    """Metadata of a key, available without reading it."""

    key: str
    size: int
    """Bytes."""
    modified_unix: float
    """Time of creation."""


@dataclass(frozen=True)
class Upload:
    """Parts of a large file whose upload has not ended. They take space, but are not readable under a key."""

    key: str
    started_unix: float
    upload_id: str


def check_key(key: str) -> str:
    """Return `key` if it is well-formed. Raises StoreError if it contains `..` or starts with a slash."""
    if not _KEY.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise StoreError(f"store key {key!r} is not a relative path of letters, digits and _.=@+-")
    return key
