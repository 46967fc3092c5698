"""Compare a workspace with its template, both local directories, as a git-format patch (envd/tools/gitdiff.py).

The same two trees give the same bytes on every machine. Files whose size, mode and modification time equal the
template's count as unchanged. Files that this process can't read do not count. A patch beyond the bounds becomes
`OVERSIZED`, which applies nowhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from envd.tools.gitdiff import MAX_DIFF_BYTES, MAX_DIFF_LINES, OVERSIZED, Change, Side, patch_of
from envd.tools.searching import HIDDEN

__all__ = [
    "LINK",
    "MAX_DIFF_BYTES",
    "MAX_DIFF_LINES",
    "OVERSIZED",
    "Entry",
    "changed_paths",
    "side_at",
    "tree_entries",
    "workspace_diff",
]


LINK = "120000"
"""Mode of a symbolic link."""


@dataclass(frozen=True)
class Entry:
    """A file or a symbolic link of a tree. `stamp`, its size and modification time, shows most changes cheaply."""

    mode: str
    stamp: tuple[int, int]


def tree_entries(root: Path, hidden: Collection[str] = HIDDEN) -> dict[str, Entry]:
    """Files and symbolic links below root by path, as in git: no empty directories, devices or `hidden` names."""
    return dict(_scan(str(root), hidden))


def changed_paths(template: Path, workspace: Path, hidden: Collection[str] = HIDDEN) -> list[str]:
    """Sorted paths that differ in content or mode, appeared or disappeared, except `hidden` names."""
    return [path for path, _, _ in _changes(template, workspace, hidden)]


def workspace_diff(template: Path, workspace: Path) -> bytes:
    """Patch that turns the template into the workspace; empty if they are equal, OVERSIZED beyond the bounds."""
    return patch_of(_changes(template, workspace))


def _changes(template: Path, workspace: Path, hidden: Collection[str] = HIDDEN) -> Iterator[Change]:
    old, new = tree_entries(template, hidden), tree_entries(workspace, hidden)
    for path in sorted(old.keys() | new.keys()):
        if path in old and path in new and old[path] == new[path] and old[path].mode != LINK:
            continue
        before = side_at(template, path, old.get(path))
        after = side_at(workspace, path, new.get(path))
        if before != after:
            yield path, before, after


def _scan(root: str, hidden: Collection[str]) -> Iterator[tuple[str, Entry]]:
    """Walk without recursion, since an agent may nest directories arbitrarily deep. Skips what it can't read."""
    pending = [(root, "")]
    while pending:
        directory, prefix = pending.pop()
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError:
            continue  # locked by the agent, removed meanwhile, or its path is too long
        for entry in entries:
            if entry.name in hidden:
                continue
            path = prefix + entry.name
            try:
                about = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # as above: a directory may be readable without search permission
            stamp = (about.st_size, about.st_mtime_ns)
            if stat.S_ISDIR(about.st_mode):
                pending.append((entry.path, path + "/"))
            elif stat.S_ISLNK(about.st_mode):
                yield path, Entry(LINK, stamp)
            elif stat.S_ISREG(about.st_mode):
                yield path, Entry("100755" if about.st_mode & 0o100 else "100644", stamp)


def side_at(root: Path, path: str, entry: Entry | None) -> Side | None:
    """Mode and content at a path of a tree; None if there is nothing or it can't be read."""
    if entry is None:
        return None
    where = root / path
    try:
        data = os.fsencode(where.readlink()) if entry.mode == LINK else _content(where)
    except OSError:
        return None
    return Side(entry.mode, data)


def _content(where: Path) -> bytes:
    """Read a file. Does not block on a named pipe that a background process has put there since the walk."""
    with os.fdopen(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(where)
        return file.read()
