"""Byte code of hidden test files and of a template's modules, so that runs of the same files do not each compile them.

Most of a short run is compiling: pytest rewrites the tests' assertions, and the task's package is imported. A file is
compiled once, in a sandbox of its own, in which no code of a task runs; every run places the result beside the file,
where pytest or Python looks for it. Both check that it is the byte code of the file's content. No run goes without:
code under test would tell a test file that runs often from a decoy, which does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

MOST_BYTES = 64 * 1024 * 1024
_MOST_OF_FILE = 4 * 1024 * 1024
"""Byte code of one file that is kept."""
_MOST_MODULES, _MOST_OF_MODULES = 1000, 4 * 1024 * 1024
"""Most modules of a template, and bytes of them, that are compiled: to place them takes time, memory and disk."""

Compile = Callable[[Sequence[str]], Awaitable[dict[str, bytes]]]
"""Byte code of files, by path; empty for one that can't be compiled, which is remembered. Raises EnvdError."""


class CompiledFiles:
    """Cache of byte code, bounded by MOST_BYTES."""

    def __init__(self) -> None:
        self._codes: OrderedDict[str, bytes] = OrderedDict()
        self._work: dict[str, asyncio.Task[None]] = {}
        self._bytes = 0

    async def of(self, keys: Mapping[str, str], compiled: Compile) -> dict[str, bytes]:
        """Byte code by path. keys: `key_of` each file, by path. `compiled` makes what is missing.

        Raises the EnvdError of `compiled`, of which nothing is kept: a run without byte code would differ from others.
        """
        missing = {path: key for path, key in sorted(keys.items()) if key not in self._codes and key not in self._work}
        if missing:
            work = asyncio.create_task(self._make(missing, compiled))
            self._work.update(dict.fromkeys(missing.values(), work))
        await asyncio.gather(*{asyncio.shield(self._work[key]) for key in keys.values() if key in self._work})
        found = {path: self._codes[key] for path, key in keys.items() if self._codes.get(key)}
        for path in found:
            self._codes.move_to_end(keys[path])
        return found

    async def _make(self, missing: Mapping[str, str], compiled: Compile) -> None:
        try:
            codes = await compiled(list(missing))
        finally:
            for key in missing.values():
                del self._work[key]
        for path, key in missing.items():
            code = codes.get(path, b"")
            self._codes[key] = code = code if len(code) <= _MOST_OF_FILE else b""
            self._bytes += len(code)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._codes.popitem(last=False)[1])


def key_of(path: str, content: bytes) -> str:
    """Key of a file: byte code holds its path."""
    return hashlib.sha256(path.encode() + b"\0" + content).hexdigest()


@lru_cache(256)
def modules_of(directory: Path) -> Mapping[str, str]:
    """Keys of the modules of a template, by path, without those of tests; empty if they are too many. Blocking."""
    found, total = dict[str, str](), 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if name.isidentifier() and name != "__pycache__"]
        for name in names:
            file = Path(folder, name)
            if not name.endswith(".py") or name.startswith("test_") or name == "conftest.py" or file.is_symlink():
                continue
            content, path = file.read_bytes(), str(file.relative_to(directory))
            total += len(content)
            found[path] = key_of(path, content)
            if len(found) > _MOST_MODULES or total > _MOST_OF_MODULES:
                return {}
    return found
