"""A patch made in a process of its own: what it costs is bounded by the kernel, and ends with the process.

In: `marshal`led changes, one after another, on standard input. Out: the patch on standard output.
"""

from __future__ import annotations

import marshal
import os
import resource
import sys
from collections.abc import Iterator

from envd.tools.gitdiff import Change, Side, patch_of

_MEMORY = 4 * 1024**3
_CPU_S = 60


def packed(change: Change) -> bytes:
    """A change as it goes over the pipe."""
    path, *sides = change
    return marshal.dumps((path, *((side.mode, side.data) if side else None for side in sides)))


def _changes() -> Iterator[Change]:
    while True:
        try:
            path, before, after = marshal.load(sys.stdin.buffer)
        except EOFError:
            return
        yield path, Side(*before) if before else None, Side(*after) if after else None


def main() -> None:
    """Run as a process."""
    os.nice(5)
    for limit, value in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _CPU_S), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    sys.stdout.buffer.write(patch_of(_changes()))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
