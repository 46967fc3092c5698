"""What of a sandbox's changes an export lets out: the declared files, within its count and its size, and no link.

admits(path)            by the listing: is it declared, is it no link?
fits(path), take(path)  as the diff is made: is there room for it, by what was really read?
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from contracts.patterns import PathPatterns
from contracts.pb import envd_pb2 as pb
from envd.errors import EnvdError
from envd.server.audit import AuditLog
from envd.types import LeftOut

Reason = Literal["undeclared", "link", "count", "size"]
TOLD = 64
"""Paths that an answer names."""
_PATH = 512
"""Characters of a path that are told."""


class Exporting:
    """One export on its way into one diff."""

    def __init__(self, request: pb.Export) -> None:
        """Raises EnvdError where it is none."""
        if request.max_files < 0 or request.max_bytes < 0:
            raise EnvdError("an export's max_files and max_bytes may not be below 0: leave them out for no bound")
        self._patterns = patterns_of(request.artifacts)
        self._request = request
        self._chosen, self._taken = _Told(), _Told()
        self._files = self._bytes = 0

    def admits(self, path: str, *, is_link: bool) -> bool:
        """Whether what is at this path may leave at all; what may not is noted."""
        if self._patterns is None:
            return True
        if not self._patterns.names(path):
            self._chosen.note(path, "undeclared")
        elif is_link:
            self._chosen.note(path, "link")
        else:
            return True
        return False

    def start(self) -> None:
        """The diff is made from its first file on, perhaps again."""
        self._taken = _Told()
        self._files = self._bytes = 0

    @property
    def room(self) -> int | None:
        """Bytes that may still leave; None: any number."""
        return self._request.max_bytes - self._bytes if self._request.max_bytes else None

    def fits(self, path: str, size: int) -> bool:
        """Whether a changed file of this size may leave; what may not is noted."""
        if self._request.max_files and self._files >= self._request.max_files:
            self._taken.note(path, "count")
        elif self.room is not None and size > self.room:
            self._taken.note(path, "size")
        else:
            return True
        return False

    def take(self, path: str, size: int) -> bool:
        """As `fits`, and counts it."""
        if not self.fits(path, size):
            return False
        self._files += 1
        self._bytes += size
        return True

    @property
    def left_out(self) -> LeftOut:
        """What was left out of the diff, once it is made."""
        counts = self._chosen.counts + self._taken.counts
        paths = [*self._chosen.named["link"], *self._taken.named["count"], *self._taken.named["size"]]
        return LeftOut(dict(counts), tuple([*sorted(paths), *self._chosen.named["undeclared"]][:TOLD]))

    def record(self, audit: AuditLog, sandbox_id: str) -> None:
        """Tell of declared files that were refused; undeclared ones are the agent's own business, and only counted."""
        left_out = self.left_out
        if left_out.counts.keys() - {"undeclared"}:
            refused = [path for path, reason in left_out.paths if reason != "undeclared"]
            audit.record("export.refused", sandbox_id, **left_out.counts, paths=refused[:8])


class _Told:
    """How many were left out for which reason, and the first of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[Reason, list[tuple[str, Reason]]] = {"undeclared": [], "link": [], "count": [], "size": []}

    def note(self, path: str, reason: Reason) -> None:
        self.counts[reason] += 1
        if len(self.named[reason]) < TOLD:
            self.named[reason].append((shown(path), reason))


def patterns_of(artifacts: Iterable[str]) -> PathPatterns | None:
    """What these name; None for none. Raises EnvdError."""
    patterns = list(artifacts)
    try:
        return PathPatterns(patterns) if patterns else None
    except ValueError as error:
        raise EnvdError(str(error)) from None


def shown(path: str) -> str:
    """A path as text that any reader takes."""
    return os.fsencode(path).decode(errors="backslashreplace")[:_PATH]
