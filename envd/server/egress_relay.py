"""Streams of sandboxes' proxies: TCP streams with bounded buffers, and a relay in both directions that ends with both
streams or after idling.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from envd.server.destinations import Address

IDLE_S = 300.0
"""Seconds without traffic after which a connection is closed."""
_BUFFER = 64 * 1024
"""Read-ahead limit of a stream, in bytes. At most twice as many wait to be read, and about as many to be written."""
_LINGER_S, _LINGER_READS = 1.0, 64


class Stream:
    """A connected TCP stream that counts the bytes written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.written = 0
        """Number of bytes written."""

    @classmethod
    async def over(cls, sock: socket.socket) -> Stream:
        """Make a stream over a connected socket, which the stream then owns."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(*await asyncio.open_connection(sock=sock, limit=_BUFFER))
        except BaseException:
            sock.close()
            raise

    async def read(self) -> bytes:
        """Wait for data and return it; empty at the end of the stream. Raises OSError."""
        return await self._reader.read(_BUFFER)

    async def write(self, data: bytes) -> None:
        """Write data and wait for room in the buffer. Raises OSError."""
        self._writer.write(data)
        self.written += len(data)
        await self._writer.drain()

    def end(self) -> None:
        """Close the stream for writing."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    async def finish(self, data: bytes) -> bool:
        """Write the last data and close for writing; return whether the other end still sent data.

        That data is read for at most _LINGER_S, since unread data would reset the connection and lose the last write.
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
            pass  # includes TimeoutError
        return said

    def abort(self) -> None:
        """Close the stream immediately. Idempotent."""
        self._writer.transport.abort()


async def connect(address: Address, port: int) -> Stream:
    """Connect to exactly this address and port. Raises OSError."""
    sock = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return await Stream.over(sock)


async def relay(inside: Stream, outside: Stream, ahead: bytes) -> None:
    """Relay bytes in both directions until both streams have ended. ahead: data already read from `inside`.

    Raises OSError, also after IDLE_S without traffic.
    """
    async with asyncio.timeout(IDLE_S) as bound:
        if ahead:
            await outside.write(ahead)
        await together(_pump(inside, outside, bound), _pump(outside, inside, bound))


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Run coroutines concurrently; raise the first failure and cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def moved(bound: asyncio.Timeout) -> None:
    """Restart the idle timeout after traffic."""
    if not bound.expired():
        bound.reschedule(asyncio.get_running_loop().time() + IDLE_S)


async def _pump(source: Stream, target: Stream, bound: asyncio.Timeout) -> None:
    while data := await source.read():
        moved(bound)
        await target.write(data)
        moved(bound)
    target.end()
