"""Bound what clients read of HTTP replies: a broken or hostile server must not fill their memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

_ENCODING = "Accept-Encoding"


class UnfitReply(httpx.HTTPError):
    """A reply is longer than its client takes, or compressed, so that its length is unknown."""


def bounded_client(most: int, **options: Any) -> httpx.Client:
    """A client whose replies have at most `most` bytes; else its methods raise UnfitReply. options: httpx's own."""

    def check(reply: httpx.Response) -> None:
        _bound(reply, most)

    return httpx.Client(event_hooks={"response": [check]}, **_uncompressed(options))


def bounded_async_client(most: int, **options: Any) -> httpx.AsyncClient:
    """See `bounded_client`."""

    async def check(reply: httpx.Response) -> None:
        _bound(reply, most)

    return httpx.AsyncClient(event_hooks={"response": [check]}, **_uncompressed(options))


def _uncompressed(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"headers": {**(options.get("headers") or {}), _ENCODING: "identity"}}


def _bound(reply: httpx.Response, most: int) -> None:
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        raise UnfitReply("it is compressed, which the request forbids")
    reply.stream = _Bounded(reply.stream, most)


class _Bounded(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most, self._left = stream, most, most

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            yield self._counted(chunk)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield self._counted(chunk)

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def _counted(self, chunk: bytes) -> bytes:
        self._left -= len(chunk)
        if self._left < 0:
            raise UnfitReply(f"it has more than {self._most >> 20} MiB")
        return chunk
