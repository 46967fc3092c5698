"""Paths that a git patch names."""

from __future__ import annotations

import re
from functools import lru_cache

_HEADER = re.compile(rb"^(?:---|\+\+\+) (?:[ab]/)([^\t\n]+)", re.MULTILINE)


@lru_cache(4096)
def changed_paths(diff: bytes) -> tuple[str, ...]:
    """Sorted paths of the text files that a patch changes, if they are UTF-8 and unquoted."""
    found = set[str]()
    for name in _HEADER.findall(diff):
        try:
            found.add(name.decode())
        except UnicodeDecodeError:
            continue
    return tuple(sorted(found))
