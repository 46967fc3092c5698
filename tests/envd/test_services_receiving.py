"""The receiving side of a move: senders that stop half-way, and hostile ones."""

from __future__ import annotations

import asyncio
import io
import math
import tarfile
from pathlib import Path

import grpc
import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.operations.client import OperationsClient
from envd.server.operations import migration
from tests.envd.harness import FILES, Harness, served


def test_a_sender_that_stops_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_IDLE_S", 1.0)

    async def job() -> None:
        half = tar_of(("a", tarfile.REGTYPE, b"x" * 90_000))[:50_000]
        async with served(tmp_path) as client:
            for how in ("is silent", "goes away"):
                call = client.operations.Receive()
                await call.write(operations_pb.SnapshotChunk(header=header(), data=half))
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


def header(**changes: object) -> operations_pb.ReceiveHeader:
    values: dict[str, object] = {
        "sandbox_id": "A" * 22,
        "token": "t" * 32,
        "backend": "plain",
        "template_files": FILES,
        "limits": pb.Limits(memory_mb=64, disk_mb=8, lifetime_s=60),
        "expires_in_s": 60,
    }
    return operations_pb.ReceiveHeader(**{**values, **changes})  # type: ignore[arg-type]


def tar_of(*members: tuple[str, bytes, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, data in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(data), "/etc/passwd"
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


HOSTILE = {
    "no header": [operations_pb.SnapshotChunk(data=b"x")],
    "nothing": [],
    "no tar": [operations_pb.SnapshotChunk(header=header()), operations_pb.SnapshotChunk(data=b"\xff" * 4096)],
    "cut off": [operations_pb.SnapshotChunk(header=header(), data=tar_of(("a", tarfile.REGTYPE, b"x" * 9000))[:2000])],
    "a way out": [operations_pb.SnapshotChunk(header=header(), data=tar_of(("../../out", tarfile.REGTYPE, b"x")))],
    "an absolute path": [
        operations_pb.SnapshotChunk(header=header(), data=tar_of(("/tmp/out", tarfile.REGTYPE, b"x")))
    ],
    "a link": [operations_pb.SnapshotChunk(header=header(), data=tar_of(("link", tarfile.SYMTYPE, b"")))],
    "a device": [operations_pb.SnapshotChunk(header=header(), data=tar_of(("device", tarfile.CHRTYPE, b"")))],
    "a state of another form": [
        operations_pb.SnapshotChunk(header=header(), data=tar_of(("odd", tarfile.REGTYPE, b"x")))
    ],
    "an id that is a path": [operations_pb.SnapshotChunk(header=header(sandbox_id="../../x"), data=tar_of())],
    "a host name that is an option": [operations_pb.SnapshotChunk(header=header(host_name="--x"), data=tar_of())],
    "an endless host name": [operations_pb.SnapshotChunk(header=header(host_name="x" * 100_000), data=tar_of())],
    "a backend that is not here": [operations_pb.SnapshotChunk(header=header(backend="other"), data=tar_of())],
    "a template with a way out": [
        operations_pb.SnapshotChunk(header=header(template_files={"../x": b""}), data=tar_of())
    ],
    "limits that are none": [operations_pb.SnapshotChunk(header=header(limits=pb.Limits(memory_mb=-1)), data=tar_of())],
}


@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_a_sandbox_that_would_never_expire_is_refused(plain: Harness, seconds: float) -> None:
    async def job(client: OperationsClient) -> None:
        chunk = operations_pb.SnapshotChunk(header=header(expires_in_s=seconds), data=tar_of())
        with pytest.raises(grpc.aio.AioRpcError, match=r"expires_in_s=.*: must be at least 0"):
            await client.operations.Receive(iter([chunk]))

    plain.client(job)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda name: name.replace(" ", "-"))
def test_a_hostile_sender_is_refused_and_nothing_stays(plain: Harness, case: str) -> None:
    async def job(client: OperationsClient) -> None:
        before = (await client.info()).live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.operations.Receive(iter(HOSTILE[case]))
        assert caught.value.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), caught.value.details()
        assert (await client.info()).live == before

    plain.client(job)
