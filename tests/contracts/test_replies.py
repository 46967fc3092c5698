"""Clients give up replies without end, and those that are compressed, before they fill the memory."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from contracts.replies import UnfitReply, bounded_async_client, bounded_client

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, pieces: int | None = None) -> None:
        self.given, self.closed = 0, False
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for given in itertools.count(1) if self._pieces is None else range(1, self._pieces + 1):
            self.given = given
            yield bytes(MIB // 2)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


def transport(body: Endless | bytes, **headers: str) -> httpx.MockTransport:
    def reply(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == "identity" and request.headers["x-own"] == "1"
        if isinstance(body, bytes):
            return httpx.Response(200, headers=headers, stream=httpx.ByteStream(body))
        return httpx.Response(200, headers=headers, stream=body)

    return httpx.MockTransport(reply)


async def test_a_reply_within_the_bound_is_read_and_an_endless_one_is_not() -> None:
    own = {"x-own": "1"}
    for pieces, most in ((4, 2 * MIB), (None, 2 * MIB)):
        one, other = Endless(pieces), Endless(pieces)
        with bounded_client(most, headers=own, transport=transport(one)) as client:
            async with bounded_async_client(most, headers=own, transport=transport(other)) as asynchronous:
                if pieces:
                    assert len(client.get("http://x").content) == len((await asynchronous.get("http://x")).content)
                    continue
                with pytest.raises(UnfitReply, match="more than 2 MiB"):
                    client.get("http://x")
                with pytest.raises(UnfitReply, match="more than 2 MiB"):
                    await asynchronous.get("http://x")
                assert one.closed and other.closed and one.given == other.given == 5


def test_a_compressed_reply_is_not_read() -> None:
    body = transport(gzip.compress(bytes(100 * MIB)), **{"content-encoding": "gzip"})
    with bounded_client(MIB, headers={"x-own": "1"}, transport=body) as client:
        with pytest.raises(UnfitReply, match="compressed"):
            client.get("http://x")
