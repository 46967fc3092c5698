"""Select the changes that an export contains: declared files, within its maximum count and size, and no links.

admits(path)            by the listing: is the path declared and not a link?
fits(path), take(path)  while the diff is made: does the file fit, by the size that was read?
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
"""Maximum number of paths in a reply."""
_PATH = 512
"""Maximum characters of a path in a reply."""


class Exporting:
    """Selection of one export while its diff is made."""

    def __init__(self, request: pb.Export) -> None:
        """Raises EnvdError for negative bounds or invalid patterns."""
        if request.max_files < 0 or request.max_bytes < 0:
            raise EnvdError("an export's max_files and max_bytes may not be below 0: leave them out for no bound")
        self._patterns = patterns_of(request.artifacts)
        self._request = request
        self._chosen, self._taken = _Told(), _Told()
        self._files = self._bytes = 0

    def admits(self, path: str, *, is_link: bool) -> bool:
        """Whether the entry at a path may be exported. Notes the path if not."""
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
        """Reset the counts: the diff starts from its first file, possibly again."""
        self._taken = _Told()
        self._files = self._bytes = 0

    @property
    def room(self) -> int | None:
        """Remaining bytes of the export; None: no bound."""
        return self._request.max_bytes - self._bytes if self._request.max_bytes else None

    def fits(self, path: str, size: int) -> bool:
        """Whether a changed file of this size fits. Notes the path if not."""
        if self._request.max_files and self._files >= self._request.max_files:
            self._taken.note(path, "count")
        elif self.room is not None and size > self.room:
            self._taken.note(path, "size")
        else:
            return True
        return False

    def take(self, path: str, size: int) -> bool:
        """Like `fits`, and count the file if it fits."""
        if not self.fits(path, size):
            return False
        self._files += 1
        self._bytes += size
        return True

    @property
    def left_out(self) -> LeftOut:
        """Changes that were left out of the diff, once it is made."""
        counts = self._chosen.counts + self._taken.counts
        paths = [*self._chosen.named["link"], *self._taken.named["count"], *self._taken.named["size"]]
        return LeftOut(dict(counts), tuple([*sorted(paths), *self._chosen.named["undeclared"]][:TOLD]))

    def record(self, audit: AuditLog, sandbox_id: str) -> None:
        """Record refused files in the audit log, unless all of them are undeclared: an agent may write such files."""
        left_out = self.left_out
        if left_out.counts.keys() - {"undeclared"}:
            refused = [path for path, reason in left_out.paths if reason != "undeclared"]
            audit.record("export.refused", sandbox_id, **left_out.counts, paths=refused[:8])


class _Told:
    """Number of paths left out by reason, and the first TOLD paths of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.named: dict[Reason, list[tuple[str, Reason]]] = {"undeclared": [], "link": [], "count": [], "size": []}

    def note(self, path: str, reason: Reason) -> None:
        self.counts[reason] += 1
        if len(self.named[reason]) < TOLD:
            self.named[reason].append((shown(path), reason))


def patterns_of(artifacts: Iterable[str]) -> PathPatterns | None:
    """Compile path patterns; None if there are none. Raises EnvdError for an invalid one."""
    patterns = list(artifacts)
    try:
        return PathPatterns(patterns) if patterns else None
    except ValueError as error:
        raise EnvdError(str(error)) from None


def shown(path: str) -> str:
    """Path as text, at most _PATH characters; bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")[:_PATH]
