"""The receiving side of a move: senders that stop half-way, and hostile ones."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import grpc
import pytest

from contracts.pb import envd_pb2 as pb
from envd.client import SandboxClient
from envd.server import migration
from tests.envd.harness import FILES, Harness, served


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
        "sandbox_id": "A" * 22,
        "token": "t" * 32,
        "backend": "plain",
        "template_files": FILES,
        "limits": pb.Limits(memory_mb=64, disk_mb=8, lifetime_s=60),
        "expires_in_s": 60,
    }
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
}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda name: name.replace(" ", "-"))
def test_a_hostile_sender_is_refused_and_nothing_stays(plain: Harness, case: str) -> None:
    async def job(client: SandboxClient) -> None:
        before = (await client.info()).live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.sandboxes.Receive(iter(HOSTILE[case]))
        assert caught.value.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), caught.value.details()
        assert (await client.info()).live == before

    plain.client(job)
