"""Tell paths that failed because of a link out of the workspace from paths that do not exist.

The agent resolves such a link inside the workspace, so the server only sees a missing file. The check runs afterwards
in the background: a failed call is answered at once, and a successful one costs nothing.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence

from envd.errors import EnvdError
from envd.guest.link import GuestLink
from envd.server.audit import AuditLog, leaves_root
from envd.server.live import Live
from envd.tools.paths import relative

MISSED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.EACCES, errno.EEXIST})
"""Errors that a link out of the workspace may cause."""
_MOST_PARTS = 16
_LOOK_S = 10.0


class Escapes:
    """Records links out of the workspace on which calls failed."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._looking: set[Live] = set()

    async def look(self, live: Live, paths: Sequence[str]) -> None:
        """Record the first link on these paths that leads out of the workspace.

        Only one check per sandbox runs at a time. Paths that fail meanwhile are not checked.
        """
        if live in self._looking:
            return
        self._looking.add(live)
        try:
            async with asyncio.timeout(_LOOK_S), live.using() as guest:
                for path in paths:
                    found = await leaving_link(guest, path)
                    if found is not None:
                        self._audit.record("path.escape", live.identity, path=path, link=found[0], target=found[1])
                        return
        except (EnvdError, OSError):
            return  # the sandbox has ended, or does not run now
        finally:
            self._looking.discard(live)


async def leaving_link(guest: GuestLink, path: str) -> tuple[str, str] | None:
    """First link on a path with a target outside the workspace, and that target; None if there is none."""
    parts = relative(path).split("/")[:_MOST_PARTS]
    for count in range(1, len(parts) + 1):
        prefix = "/".join(parts[:count])
        try:
            entry = await guest.stat(prefix, follow=False)
        except OSError:
            return None
        if entry.target and leaves_root(prefix, entry.target):
            return prefix, entry.target
    return None
