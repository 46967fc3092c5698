"""Paths that failed because a link on them leads out of the workspace, told apart from paths that are merely not there.

The agent resolves such a link inside the workspace, so all that its server sees is a file that does not exist. Looked
at afterwards and in the background: what failed is answered at once, and what worked costs nothing.
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
"""Errors that a link to the outside may end in."""
_MOST_PARTS = 16
_LOOK_S = 10.0


class Escapes:
    """Records links that lead out of the workspace where a call failed on them."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._looking: set[Live] = set()

    async def look(self, live: Live, paths: Sequence[str]) -> None:
        """Record the first link of these paths that leaves the workspace.

        One look a sandbox at a time: a flood is not followed.
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
            return  # it ended, or does not run now
        finally:
            self._looking.discard(live)


async def leaving_link(guest: GuestLink, path: str) -> tuple[str, str] | None:
    """The first link on a path whose target lies outside the workspace, and the target; None where there is none."""
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
