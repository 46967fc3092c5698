"""Resolve workspace paths through the sandbox's own links, and check whether the rules hide them."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from envd.guest.link import GuestLink
from envd.server.rules import hides
from envd.tools.paths import relative

_MAX_STEPS = 256


async def resolved(guest: GuestLink, path: str) -> str:
    """Resolve links and `..` of a path relative to the workspace.

    Raises OSError if no file or directory is there.
    """
    done, _, error = await _walk(guest, path)
    if error is not None:
        raise error
    return done


async def is_hidden(guest: GuestLink, hidden: Sequence[str], path: str) -> bool:
    """Whether these globs match a path or the path that it resolves to. Of a missing path, its existing parents are
    resolved.
    """
    if not hidden:
        return False
    if hides(hidden, relative(path)):
        return True
    done, rest, _ = await _walk(guest, path)
    return hides(hidden, os.path.normpath("/".join([done, *rest])))


async def _walk(guest: GuestLink, path: str) -> tuple[str, list[str], OSError | None]:
    """Resolve a path as far as possible: (resolved part, remaining parts, error that stopped it or None)."""
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
