"""Moving a sandbox between two servers while its client keeps its id."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from contracts.pb import envd_pb2 as pb
from envd.client import EnvdError, SandboxClient, SandboxGone, ToolCall
from envd.errors import MigrationError
from envd.local import LocalEnvd
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
