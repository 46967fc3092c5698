"""A sandbox's state as a stream between two servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envd.errors import EnvdError
from envd.server.operations.stateflow import pack, unpack


def test_a_state_goes_through_a_stream_unchanged_and_its_zeros_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    target.mkdir()
    (source / "deep" / "er" / "data").write_bytes(bytes(range(256)) * 5000)
    (source / "empty").write_bytes(b"")
    with (source / "sparse").open("wb") as file:
        file.truncate(30 << 20)
        file.seek(10 << 20)
        file.write(b"in the middle")

    async def job() -> None:
        await unpack(pack(source), target, 64 << 20)

    asyncio.run(job())
    for path in source.rglob("*"):
        if path.is_file():
            assert (target / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert (target / "sparse").stat().st_blocks * 512 < 4 << 20


def test_a_state_larger_than_its_room_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "source" / "big").write_bytes(bytes(3 << 20))

    async def job() -> None:
        with pytest.raises(EnvdError, match="larger"):
            await unpack(pack(tmp_path / "source"), tmp_path / "target", 1 << 20)

    asyncio.run(job())


def test_a_receiver_that_stops_reading_ends_the_sender(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(8 << 20))

    async def job() -> None:
        stream: AsyncIterator[bytes] = pack(tmp_path)
        assert await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(job(), 20))
