"""Where paths of a workspace lead, as the sandbox's own links have it, and what the rules hide of that."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from envd.guest.link import GuestLink
from envd.server.rules import hides
from envd.tools.paths import relative

_MAX_STEPS = 256


async def resolved(guest: GuestLink, path: str) -> str:
    """The path without links and `..`, taken from the workspace as all paths are.

    Raises OSError where no file or directory is there.
    """
    done, _, error = await _walk(guest, path)
    if error is not None:
        raise error
    return done


async def is_hidden(guest: GuestLink, hidden: Sequence[str], path: str) -> bool:
    """Whether these globs hide a path, by its name or by where it leads; of one that is not there, where its parents
    lead.
    """
    if not hidden:
        return False
    if hides(hidden, relative(path)):
        return True
    done, rest, _ = await _walk(guest, path)
    return hides(hidden, os.path.normpath("/".join([done, *rest])))


async def _walk(guest: GuestLink, path: str) -> tuple[str, list[str], OSError | None]:
    """How far a path leads, what of it is left, and why."""
    todo = relative(path).split("/")[::-1]
    done: list[str] = []
    try:
        for _ in range(_MAX_STEPS):
            if not todo:
                return "/".join(done) or ".", [], None
            part = todo[-1]
            if part in ("", ".", ".."):
                done = done[:-1] if part == ".." else done
                todo.pop()
                continue
            entry = await guest.stat("/".join([*done, part]), follow=False)
            if entry.type == "other":
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            todo.pop()
            if entry.type == "link":
                done = [] if entry.target.startswith("/") else done
                todo += relative(entry.target).split("/")[::-1]
            else:
                done.append(part)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except OSError as error:
        return "/".join(done) or ".", todo[::-1], error
