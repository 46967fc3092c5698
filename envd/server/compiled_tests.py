"""Byte code of hidden test files, so that runs of the same files do not each rewrite their assertions.

Most of a short run is pytest's rewriting of assertions. A file that is seen a second time is compiled in a sandbox of
its own, in which no code of a task runs; later runs place the result beside the file, where pytest looks for it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

from envd.errors import EnvdError

MOST_BYTES = 64 * 1024 * 1024
_MOST_SEEN = 65_536
_MOST_OF_FILE = 4 * 1024 * 1024
"""Byte code of one file that is kept."""

Compile = Callable[[str, bytes], Awaitable[bytes]]
"""Byte code of a test file, by path and content; empty if it has none. Raises EnvdError."""


class CompiledTests:
    """Cache of byte code, bounded by MOST_BYTES. A file whose compilation fails has no byte code."""

    def __init__(self) -> None:
        self._codes: OrderedDict[str, bytes] = OrderedDict()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._work: dict[str, asyncio.Task[bytes]] = {}
        self._bytes = 0

    async def of(self, files: Mapping[str, bytes], compiled: Compile) -> dict[str, bytes]:
        """Byte code by path, of those files that were seen before. `compiled` makes what is missing."""
        found = {path: await self._one(path, content, compiled) for path, content in sorted(files.items())}
        return {path: code for path, code in found.items() if code}

    async def _one(self, path: str, content: bytes, compiled: Compile) -> bytes:
        key = hashlib.sha256(path.encode() + b"\0" + content).hexdigest()
        if key in self._codes:
            self._codes.move_to_end(key)
            return self._codes[key]
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
            return b""
        if key not in self._work:
            self._work[key] = asyncio.create_task(self._make(key, path, content, compiled))
        return await asyncio.shield(self._work[key])

    async def _make(self, key: str, path: str, content: bytes, compiled: Compile) -> bytes:
        try:
            code = await compiled(path, content)
        except EnvdError:
            code = b""  # pytest will say in the run what is wrong with the file
        finally:
            del self._work[key]
        code = code if len(code) <= _MOST_OF_FILE else b""
        self._codes[key] = code
        self._bytes += len(code)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._codes.popitem(last=False)[1])
        return code
