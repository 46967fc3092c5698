"""Streams of sandboxes' proxies: bounded buffers, and bytes both ways until both ends have said all, or neither says
anything.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from envd.server.destinations import Address

IDLE_S = 300.0
"""How long a connection lives on which nothing moves."""
_BUFFER = 64 * 1024
"""Bytes that a stream reads ahead; twice so many wait at most to be read, and about as many to be written."""
_LINGER_S, _LINGER_READS = 1.0, 64


class Stream:
    """A connected TCP socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.written = 0
        """Bytes."""

    @classmethod
    async def over(cls, sock: socket.socket) -> Stream:
        """Over a connected socket, which it owns from now on."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(*await asyncio.open_connection(sock=sock, limit=_BUFFER))
        except BaseException:
            sock.close()
            raise

    async def read(self) -> bytes:
        """What there is, as soon as there is some; empty at its end. Raises OSError."""
        return await self._reader.read(_BUFFER)

    async def write(self, data: bytes) -> None:
        """Write when there is room. Raises OSError."""
        self._writer.write(data)
        self.written += len(data)
        await self._writer.drain()

    def end(self) -> None:
        """Nothing more will be written."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def finish(self, data: bytes) -> bool:
        """Write the last words and let them arrive: what the other end still sends is read, for a moment, since else
        they would be lost.

        Returns whether it did send something.
        """
        said = False
        try:
            async with asyncio.timeout(_LINGER_S):
                await self.write(data)
                self.end()
                for _ in range(_LINGER_READS):
                    if not await self.read():
                        break
                    said = True
        except OSError:
            pass  # a deadline is one
        return said

    def abort(self) -> None:
        """Close it now. Idempotent."""
        self._writer.transport.abort()


async def connect(address: Address, port: int) -> Stream:
    """Connect to this address and no other. Raises OSError."""
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return await Stream.over(sock)


async def relay(inside: Stream, outside: Stream, ahead: bytes) -> None:
    """Carry bytes both ways until both ends have ended. ahead: what the inside has said already.

    Raises OSError, also after IDLE_S of silence.
    """
    async with asyncio.timeout(IDLE_S) as bound:
        if ahead:
            await outside.write(ahead)
        await together(_pump(inside, outside, bound), _pump(outside, inside, bound))


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run both; the first failure ends the other and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def moved(bound: asyncio.Timeout) -> None:
    """Something moved: the silence begins anew."""
    if not bound.expired():
        bound.reschedule(asyncio.get_running_loop().time() + IDLE_S)


async def _pump(source: Stream, target: Stream, bound: asyncio.Timeout) -> None:
    while data := await source.read():
        moved(bound)
        await target.write(data)
        moved(bound)
    target.end()
