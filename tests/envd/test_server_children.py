"""Processes that a busy server starts: gRPC's threads and its handlers of fork must not meet in them."""

from __future__ import annotations

import asyncio

import pytest

from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.operations.files import SandboxFiles

LINES = [b"a line of some forty characters %8d\n" % number for number in range(6000)]
CHILDREN = 16


def test_children_of_a_busy_server_become_their_programs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")  # as an application around it may have it

    async def job(address: str) -> None:
        async with OperationsClient(address) as client:
            sandbox = await client.create(await client.put_template({"large": b"".join(LINES)}))
            await sandbox.files.write(
                "large", b"".join([*LINES, b"one more\n"])
            )  # too large for the server's own process
            busy = [asyncio.ensure_future(_reads(sandbox.files)) for _ in range(4)]
            patches = await asyncio.gather(*(sandbox.diff() for _ in range(CHILDREN)))
            assert len(set(patches)) == 1 and b"+one more" in patches[0]
            for each in busy:
                each.cancel()

    with LocalEnvd("plain") as server:
        asyncio.run(job(server.address))
    assert "fork()" not in capfd.readouterr().err, "gRPC's handlers ran in a child"


async def _reads(files: SandboxFiles) -> None:
    while True:
        await files.read("large", length=1000)
