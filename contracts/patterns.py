"""Patterns of paths as in a `.gitignore`, where each pattern selects paths.

    *.py            a file of such a name, in any directory          no slash but at its end: at any depth
    src/*.py        files right in src                               a slash within or at its start: from the tree's
                    root
    src/**/data/    everything below any directory data in src       **: any number of directories; a slash at its end:
                    directories only

`*`, `?` and `[...]` match within one name. A pattern that matches a directory selects everything below it. There is no
negation (`!`).
"""

from __future__ import annotations

import fnmatch
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence

MAX_PATTERNS = 32
MAX_LENGTH = 256
"""Maximum characters of a pattern."""
_ANY_DEPTH = "**"
_REMEMBERED = 4096
"""Number of cached states of directories."""
_State = tuple[tuple[int, int], ...] | None
"""Positions in the patterns at which a path may continue; None: everything below is selected."""


class PathPatterns:
    """Matcher of paths, in time linear in the path's length.

    Raises ValueError, with a one-line message and fix, for an invalid pattern or too many patterns.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if len(patterns) > MAX_PATTERNS:
            raise ValueError(
                f"{len(patterns)} patterns of artifacts are over the bound of {MAX_PATTERNS}: name folders"
            )
        self._patterns = [_parts(pattern) for pattern in patterns]
        self._start: _State = self._closed({(index, 0) for index in range(len(patterns))})
        self._directories: OrderedDict[str, _State] = OrderedDict()

    def names(self, path: str) -> bool:
        """Whether a pattern matches a file at this path, relative to the root and without `..`."""
        directory, _, name = path.rpartition("/")
        state = self._directory(directory) if directory else self._start
        return state is None or self._next(state, name, is_directory=False) is None

    def _directory(self, path: str) -> _State:
        if path in self._directories:
            return self._directories[path]
        state = self._start
        for name in path.split("/"):
            if not state:
                break
            state = self._next(state, name, is_directory=True)
        self._directories[path] = state
        if len(self._directories) > _REMEMBERED:
            self._directories.popitem(last=False)
        return state

    def _next(self, state: Iterable[tuple[int, int]], name: str, *, is_directory: bool) -> _State:
        """State after one more name of the path."""
        found: set[tuple[int, int]] = set()
        for index, at in state:
            parts, only_directories = self._patterns[index]
            part = parts[at]
            if part is None:
                found.add((index, at))
            elif part.match(name):
                if at + 1 == len(parts):
                    if is_directory or not only_directories:
                        return None
                    continue
                found.add((index, at + 1))
        return self._closed(found) if found else ()

    def _closed(self, found: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """State with the positions that `**` may skip."""
        for index, at in tuple(found):
            parts = self._patterns[index][0]
            while parts[at] is None:
                at += 1
                found.add((index, at))
        return tuple(sorted(found))


_Parts = tuple[list[re.Pattern[str] | None], bool]
"""A pattern's names, with None for `**`, which is never last; and whether it selects only directories."""


def _parts(pattern: str) -> _Parts:
    plain = pattern.rstrip("/")
    names = plain.lstrip("/").split("/")
    if not pattern.isprintable() or len(pattern) > MAX_LENGTH or pattern.startswith("!") or "\\" in pattern:
        raise ValueError(
            f"artifact {pattern[:80]!r} may have {MAX_LENGTH} printable characters, no backslash and no leading !:"
            " select the wanted files"
        )
    if {"", ".", ".."} & set(names) or any(_ANY_DEPTH in name and name != _ANY_DEPTH for name in names):
        raise ValueError(
            f"artifact {pattern[:80]!r} is no path within the workspace: write names between single slashes, or **"
            " alone"
        )
    if "/" not in plain:
        names.insert(0, _ANY_DEPTH)
    if names[-1] == _ANY_DEPTH:
        names.append("*")
    try:
        found = [None if name == _ANY_DEPTH else re.compile(fnmatch.translate(name)) for name in names]
    except re.error as error:
        raise ValueError(f"artifact {pattern[:80]!r} has an invalid [...]: {error}") from error
    return found, pattern.endswith("/")
