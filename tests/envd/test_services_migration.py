"""Moving a sandbox between two servers while its client keeps its id."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_operations_pb2_grpc as operations_rpc
from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.client import SandboxGone, ToolCall
from envd.errors import MigrationError
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.server.operations import migration
from tests.envd.harness import FILES, FIX, Harness, served

READ = ToolCall("read", {"path": "calc.py"})
KEY = "a-key-of-enough-characters"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    with LocalEnvd("plain", options=["--key-file", str(keys)]) as server:
        yield server.address


def test_a_sandbox_moves_under_its_id_and_is_gone_where_it_was(plain: Harness, other: str) -> None:
    async def job() -> None:
        from envd.client import Access

        async with OperationsClient(plain.address) as here, OperationsClient(other, Access(key=KEY)) as there:
            sandbox = await here.create(await here.put_template(FILES), env={"KEPT": "yes"}, labels={"moved": "1"})
            await sandbox.call(FIX)
            moved = await sandbox.migrate(there, key=KEY)
            assert moved.handle == sandbox.handle
            with pytest.raises(SandboxGone, match="moved to"):
                await sandbox.call(READ)
            assert "a + b" in (await moved.call(READ)).text
            assert (await moved.call(ToolCall("exec", {"command": "echo $KEPT"}))).text == "yes\nexit 0"
            status = await moved.status()
            assert (status.labels, status.lost, status.state) == ({"moved": "1"}, ("processes",), "running")
            assert 0 < status.expires_in_s <= 600
            assert b"a + b" in await moved.diff()
            await moved.hibernate()
            again = await moved.migrate(here)  # also while it sleeps
            assert "a + b" in (await again.call(READ)).text
            await again.close()
            assert await there.list() == []

    asyncio.run(job())


@pytest.mark.parametrize("fault", ["nobody there", "another key", "an id that is there already"])
def test_a_move_that_fails_leaves_the_sandbox_where_it_was(plain: Harness, other: str, fault: str) -> None:
    async def job() -> None:
        async with OperationsClient(plain.address) as here:
            sandbox = await here.create(await here.put_template(FILES))
            await sandbox.call(FIX)
            address = {"nobody there": "unix:/tmp/nobody", "another key": other}.get(fault, plain.address)
            with pytest.raises(MigrationError, match="goes on here"):
                await sandbox.migrate(here, address=address, key="wrong")
            assert "a + b" in (await sandbox.call(READ)).text
            assert sandbox.id in {each.id for each in await here.list()}
            await sandbox.close()

    asyncio.run(job())


class Silent(rpc.SandboxesServicer, operations_rpc.OperationsServicer):
    """A server that answers Info, and never what it is sent a sandbox by."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    async def Info(self, request: operations_pb.InfoRequest, context: object) -> operations_pb.InfoReply:
        return operations_pb.InfoReply(backends=[operations_pb.BackendInfo(name="plain")])

    async def Get(self, request: pb.GetRequest, context: object) -> pb.SandboxState:
        await asyncio.sleep(3600)
        return pb.SandboxState()

    async def Receive(
        self, request: AsyncIterator[operations_pb.SnapshotChunk], context: object
    ) -> operations_pb.ReceiveReply:
        while self._reads and await anext(request, None) is not None:
            pass
        await asyncio.sleep(3600)
        return operations_pb.ReceiveReply()


@asynccontextmanager
async def silent(kind: str, address: str) -> AsyncIterator[None]:
    """A target that takes connections at `unix:/path` and answers nothing, or only at first."""
    if kind == "says nothing":
        listening = await asyncio.start_unix_server(lambda *_: asyncio.sleep(3600), address.removeprefix("unix:"))
        try:
            yield
        finally:
            listening.close()
        return
    async with offered(Silent(reads=kind == "takes it and is silent"), address):
        yield


@asynccontextmanager
async def offered(servicer: Silent | Slow, address: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rpc.add_SandboxesServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    operations_rpc.add_OperationsServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.mark.slow
def test_a_silent_target_holds_no_sandbox_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONNECT_S", "_IDLE_S", "_RESTORE_S", "_SETTLE_S"):
        monkeypatch.setattr(migration, name, 1.0)

    async def job() -> None:
        async with served(tmp_path) as client:
            sandbox = await client.create(await client.put_template(FILES))
            await sandbox.call(FIX)
            await sandbox.files.write("large", random.Random(0).randbytes(4 << 20))
            for number, kind in enumerate(("says nothing", "takes nothing", "takes it and is silent")):
                target = f"unix:{tmp_path}/t{number}"
                async with silent(kind, target):
                    moving = asyncio.ensure_future(sandbox.migrate(client, address=target))
                    await asyncio.sleep(0.3)
                    started = time.monotonic()
                    assert "a + b" in (await sandbox.call(READ)).text, (
                        "a call waits for the move to fail, or for nothing"
                    )
                    assert time.monotonic() - started < (0.6 if kind == "says nothing" else 10)
                    with pytest.raises(MigrationError, match="goes on here"):
                        await moving
                assert (await sandbox.status()).state == "running"
            assert (await sandbox.fork()).id != sandbox.id, "its state can be changed again"
            assert not list(tmp_path.glob("state/*/snapshots/.held-*/*"))

    asyncio.run(asyncio.wait_for(job(), 60))


class Slow(rpc.SandboxesServicer, operations_rpc.OperationsServicer):
    """Takes a sandbox, and says so when it is let."""

    def __init__(self) -> None:
        self.taken, self.let = asyncio.Event(), asyncio.Event()
        self.deleted: list[str] = []

    async def Info(self, request: operations_pb.InfoRequest, context: object) -> operations_pb.InfoReply:
        return operations_pb.InfoReply(backends=[operations_pb.BackendInfo(name="plain")])

    async def Receive(
        self, request: AsyncIterator[operations_pb.SnapshotChunk], context: object
    ) -> operations_pb.ReceiveReply:
        async for _ in request:
            pass
        self.taken.set()
        await self.let.wait()
        return operations_pb.ReceiveReply()

    async def Delete(self, request: pb.DeleteRequest, context: object) -> pb.DeleteReply:
        self.deleted.append(request.sandbox_id)
        return pb.DeleteReply()


def test_a_sandbox_that_is_ended_while_it_moves_lives_nowhere(plain: Harness, tmp_path: Path) -> None:
    async def job(client: OperationsClient) -> None:
        target, slow = f"unix:{tmp_path}/t", Slow()
        async with offered(slow, target):
            sandbox = await client.create(await client.put_template(FILES))
            moving = asyncio.ensure_future(sandbox.migrate(client, address=target))
            await slow.taken.wait()
            ending = asyncio.ensure_future(sandbox.close())
            while sandbox.id in {each.id for each in await client.list()}:
                await asyncio.sleep(0.02)
            slow.let.set()
            with pytest.raises(SandboxGone):
                await moving
            await ending
            assert slow.deleted == [sandbox.id]

    plain.client(lambda client: asyncio.wait_for(job(client), 60))
