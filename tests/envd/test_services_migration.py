"""Moving a sandbox between two servers while its client keeps its id."""

from __future__ import annotations

import asyncio
import gc
import io
import random
import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.client import EnvdError, SandboxClient, SandboxGone, ToolCall
from envd.errors import MigrationError
from envd.local import LocalEnvd
from envd.server import migration
from envd.server.listening import Listening
from envd.server.serve import Options, serve
from envd.server.stateflow import pack, unpack
from tests.envd.harness import FILES, FIX, Harness

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

        async with SandboxClient(plain.address) as here, SandboxClient(other, Access(key=KEY)) as there:
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
        async with SandboxClient(plain.address) as here:
            sandbox = await here.create(await here.put_template(FILES))
            await sandbox.call(FIX)
            address = {"nobody there": "unix:/tmp/nobody", "another key": other}.get(fault, plain.address)
            with pytest.raises(MigrationError, match="goes on here"):
                await sandbox.migrate(here, address=address, key="wrong")
            assert "a + b" in (await sandbox.call(READ)).text
            assert sandbox.id in {each.id for each in await here.list()}
            await sandbox.close()

    asyncio.run(job())


class Silent(rpc.SandboxesServicer):
    """A server that answers Info, and never what it is sent a sandbox by."""

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads

    async def Info(self, request: pb.InfoRequest, context: object) -> pb.InfoReply:
        return pb.InfoReply(backends=[pb.BackendInfo(name="plain")])

    async def Get(self, request: pb.GetRequest, context: object) -> pb.SandboxState:
        await asyncio.sleep(3600)
        return pb.SandboxState()

    async def Receive(self, request: AsyncIterator[pb.SnapshotChunk], context: object) -> pb.ReceiveReply:
        while self._reads and await anext(request, None) is not None:
            pass
        await asyncio.sleep(3600)
        return pb.ReceiveReply()


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
async def offered(servicer: rpc.SandboxesServicer, address: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    rpc.add_SandboxesServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[SandboxClient]:
    """A server in this process, and what its loop could tell nobody of: at the end, nothing."""
    unheard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(str(context)))
    listening = Listening(f"unix:{tmp_path}/s")
    serving = asyncio.ensure_future(serve(Options(listening, ("plain",), tmp_path / "state")))
    try:
        async with SandboxClient(listening.address) as client:
            await client.info()  # it has started
            yield client
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        gc.collect()
        await asyncio.sleep(0)
    assert not unheard


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


class Slow(rpc.SandboxesServicer):
    """Takes a sandbox, and says so when it is let."""

    def __init__(self) -> None:
        self.taken, self.let = asyncio.Event(), asyncio.Event()
        self.deleted: list[str] = []

    async def Info(self, request: pb.InfoRequest, context: object) -> pb.InfoReply:
        return pb.InfoReply(backends=[pb.BackendInfo(name="plain")])

    async def Receive(self, request: AsyncIterator[pb.SnapshotChunk], context: object) -> pb.ReceiveReply:
        async for _ in request:
            pass
        self.taken.set()
        await self.let.wait()
        return pb.ReceiveReply()

    async def Delete(self, request: pb.DeleteRequest, context: object) -> pb.DeleteReply:
        self.deleted.append(request.sandbox_id)
        return pb.DeleteReply()


def test_a_sandbox_that_is_ended_while_it_moves_lives_nowhere(plain: Harness, tmp_path: Path) -> None:
    async def job(client: SandboxClient) -> None:
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


def test_a_sender_that_stops_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_IDLE_S", 1.0)

    async def job() -> None:
        half = tar_of(("a", tarfile.REGTYPE, b"x" * 90_000))[:50_000]
        async with served(tmp_path) as client:
            for how in ("is silent", "goes away"):
                call = client.sandboxes.Receive()
                await call.write(pb.SnapshotChunk(header=header(), data=half))
                while not list(tmp_path.glob("state/*/snapshots/.held-*/*/a")):
                    await asyncio.sleep(0.02)
                if how == "goes away":
                    call.cancel()
                else:
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert "sent nothing for 1 s" in await call.details()
                while list(tmp_path.glob("state/*/snapshots/.held-*/*")):
                    await asyncio.sleep(0.02)
                assert await client.list() == []

    asyncio.run(asyncio.wait_for(job(), 60))


def header(**changes: object) -> pb.ReceiveHeader:
    values: dict[str, object] = {
        "sandbox_id": "A" * 22, "token": "t" * 32, "backend": "plain", "template_files": FILES,
        "limits": pb.Limits(memory_mb=64, disk_mb=8, lifetime_s=60), "expires_in_s": 60,
    }  # fmt: skip
    return pb.ReceiveHeader(**{**values, **changes})  # type: ignore[arg-type]


def tar_of(*members: tuple[str, bytes, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


HOSTILE = {
    "no header": [pb.SnapshotChunk(data=b"x")],
    "nothing": [],
    "no tar": [pb.SnapshotChunk(header=header()), pb.SnapshotChunk(data=b"\xff" * 4096)],
    "cut off": [pb.SnapshotChunk(header=header(), data=tar_of(("a", tarfile.REGTYPE, b"x" * 9000))[:2000])],
    "a way out": [pb.SnapshotChunk(header=header(), data=tar_of(("../../out", tarfile.REGTYPE, b"x")))],
    "an absolute path": [pb.SnapshotChunk(header=header(), data=tar_of(("/tmp/out", tarfile.REGTYPE, b"x")))],
    "a link": [pb.SnapshotChunk(header=header(), data=tar_of(("link", tarfile.SYMTYPE, b"")))],
    "a device": [pb.SnapshotChunk(header=header(), data=tar_of(("device", tarfile.CHRTYPE, b"")))],
    "a state of another form": [pb.SnapshotChunk(header=header(), data=tar_of(("odd", tarfile.REGTYPE, b"x")))],
    "an id that is a path": [pb.SnapshotChunk(header=header(sandbox_id="../../x"), data=tar_of())],
    "a backend that is not here": [pb.SnapshotChunk(header=header(backend="other"), data=tar_of())],
    "a template with a way out": [pb.SnapshotChunk(header=header(template_files={"../x": b""}), data=tar_of())],
    "limits that are none": [pb.SnapshotChunk(header=header(limits=pb.Limits(memory_mb=-1)), data=tar_of())],
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE, ids=lambda name: name.replace(" ", "-"))
def test_a_hostile_sender_is_refused_and_nothing_stays(plain: Harness, case: str) -> None:
    async def job(client: SandboxClient) -> None:
        before = (await client.info()).live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.sandboxes.Receive(iter(HOSTILE[case]))
        assert caught.value.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), caught.value.details()
        assert (await client.info()).live == before

    plain.client(job)


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
