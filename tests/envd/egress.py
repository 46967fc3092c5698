"""A proxy on a listening socket of this host, a destination that records what reaches it, and clients that say what
they like.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from envd.backends.base import NetworkRule
from envd.server.audit import AuditLog
from envd.server.egress import Egress, Proxy

BODY = b"x" * 300_000
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Destination:
    """A TCP server on the loopback that records what each connection sends, and answers as it is told."""

    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer
        self.heard: list[bytearray] = []

    async def start(self) -> Destination:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            while data := await reader.read(65536):
                heard += data
                writer.write(self._answer(data))
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


class Way:
    """A proxy with its rules, and the destination that it may lead to."""

    def __init__(self, proxy: Proxy, audit: AuditLog, destination: Destination, port: int, asked: list[str]) -> None:
        self.proxy, self.audit, self.destination, self.port, self.asked = proxy, audit, destination, port, asked
        self.there = f"127.0.0.1:{destination.port}"

    async def open(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, *pieces: bytes, end: bool = False) -> bytes:
        """Say this on a connection of its own, and return all that comes until it is closed."""
        reader, writer = await self.open()
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if end:
                writer.write_eof()
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()

    async def tunnel(self) -> Streams:
        """A tunnel to the destination."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {self.there} HTTP/1.1\r\nHost: {self.there}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return reader, writer

    def events(self, kind: str = "network.denied") -> list[dict[str, Any]]:
        return [json.loads(event.detail_json) for event in self.audit.since() if event.kind == kind]


def through(
    job: Callable[[Way], Awaitable[None]],
    *,
    answer: Callable[[bytes], bytes] = lambda data: data,
    names: Mapping[str, Sequence[str]] | None = None,
    rules: Sequence[NetworkRule] | None = None,
) -> None:
    """Run a test against a proxy. names: what resolves to what. rules: the destination alone when None."""

    async def run() -> None:
        destination, audit, asked = await Destination(answer).start(), AuditLog(), list[str]()

        async def resolve(host: str, port: int) -> Sequence[str]:
            asked.append(host)
            if host not in (names or {}):
                raise OSError(-2, "Name or service not known")
            return (names or {})[host]

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            allowed = [NetworkRule("127.0.0.1", (destination.port,))] if rules is None else rules
            proxy = Egress(audit, resolve).open(listener, allowed, "the-sandbox")
            try:
                async with asyncio.timeout(30):
                    await job(Way(proxy, audit, destination, listener.getsockname()[1], asked))
            finally:
                await proxy.stop()
                await destination.stop()

    asyncio.run(run())


def http_answer(data: bytes) -> bytes:
    """A whole response to whatever came, with headers of one connection in it."""
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\nX-Kept:"
        " 1\r\n\r\n"
    )
    return head.encode() + BODY


def chunked_answer(data: bytes) -> bytes:
    """The same in chunks, with a length that does not hold."""
    return (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + f"{len(BODY):x}\r\n".encode()
        + BODY
        + b"\r\n0\r\n\r\n"
    )
