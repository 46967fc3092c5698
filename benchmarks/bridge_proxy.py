"""A proxy between clients and a bridge, on Unix sockets, that cuts connections when it is told to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

_PIECE = 1 << 16


class Proxy:
    """Passes bytes on in both directions. Use it as `async with Proxy(listen, target) as proxy`."""

    def __init__(self, listen: Path, target: Path) -> None:
        """listen: path of its socket. target: of the server's, which may come and go."""
        self._listen, self._target = listen, target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.accepted = 0
        """Connections so far."""

    @property
    def address(self) -> str:
        """For clients."""
        return f"unix:{self._listen}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._listen)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listen.unlink(missing_ok=True)

    def cut(self) -> int:
        """Break all connections, with what is on the way, and return how many they were."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers) // 2

    def hold(self) -> None:
        """Pass nothing on until `let_go`, as a network that has lost packets."""
        self._flowing.clear()

    def let_go(self) -> None:
        """Pass on what was held, and everything after it."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            upstream, downstream = await asyncio.open_unix_connection(self._target)
        except OSError:
            self._drop(writer)
            return
        self._writers.add(downstream)
        for source, sink in ((reader, downstream), (upstream, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_PIECE):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass  # cut, or an end has gone
        finally:
            self._drop(sink)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.close()
