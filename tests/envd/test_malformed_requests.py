"""What happens to calls outside their servicers is recorded: no messages, too large ones, clients that leave or read
nothing; by who called.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.rpc import caller
from contracts.rpc.connecting import MESSAGE_BYTES
from envd.connection import SANDBOX_TOKEN
from envd.server import malformed
from envd.server.audit import BURST, AuditLog, Event
from envd.server.live import Live
from envd.server.malformed import ACCEPTED_BYTES, Unknown, Watched
from envd.server.observing import Observing
from envd.server.rules import load_rules
from envd.server.runtimes import Runtimes
from envd.server.sandboxes import Sandboxes
from envd.server.serve import key_check
from envd.server.templates import Templates

_UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
_FILES = "/triplane.envd.v1.Files/"
Job = Callable[[grpc.aio.Channel, AuditLog], Awaitable[Any]]


class Files(rpc.FilesServicer):
    """Answers at once, or never."""

    async def Read(self, request: pb.FileReadRequest, context: Any) -> pb.FileReadReply:
        if request.path == "never":
            await asyncio.sleep(60)
        return pb.FileReadReply(data=b"x")

    async def Upload(self, request: AsyncIterator[pb.UploadChunk], context: Any) -> pb.FileStat:
        return pb.FileStat(size=sum([len(each.data) async for each in request]))

    async def Download(self, request: pb.PathRequest, context: Any) -> AsyncIterator[pb.DownloadChunk]:
        for _ in range(40):
            yield pb.DownloadChunk(data=bytes(1 << 20))


class Known(Live):
    """A sandbox that is there, without what runs in it."""

    def __init__(self, token: str) -> None:
        self.is_token = token.__eq__  # type: ignore[method-assign, assignment]


def served(tmp_path: Path, job: Job, *, address: str = "", interceptors: Any = ()) -> list[Event]:
    """Events of a job against a server with these Files."""

    async def run() -> list[Event]:
        audit: Any = AuditLog()
        nothing: Any = None
        templates, runtimes = Templates(tmp_path / "templates", os.getuid()), Runtimes(tmp_path / "runtimes")
        sandboxes = Sandboxes({}, templates, nothing, runtimes, rules=load_rules(""), audit=audit)
        sandboxes._live["own"] = Known("right")
        options = [("grpc.max_receive_message_length", ACCEPTED_BYTES)]
        server = grpc.aio.server(options=options, interceptors=[make(audit) for make in interceptors])
        rpc.add_FilesServicer_to_server(Files(), Watched(server, sandboxes))
        server.add_generic_rpc_handlers((Unknown(audit),))
        target = address or f"unix:{tmp_path}/s"
        port = server.add_insecure_port(target)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(
                target if not address else f"{address[:-1]}{port}", options=_UNBOUNDED
            ) as channel:
                await job(channel, audit)
        finally:
            await server.stop(0)
        return list(audit.since())

    return asyncio.run(asyncio.wait_for(run(), 60))


async def refused(channel: grpc.aio.Channel, method: str, data: bytes) -> tuple[str, str]:
    call: Any = channel.unary_unary(_FILES + method)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(data, timeout=30)
    return caught.value.code().name, caught.value.details() or ""


@pytest.mark.parametrize("interceptors", [(), (lambda audit: Observing([]),)])
def test_messages_above_the_limit_are_refused_as_grpc_would_and_recorded(tmp_path: Path, interceptors: Any) -> None:
    said: list[tuple[str, str]] = []

    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        for method in ("Read", "Download", "Upload"):
            said.append(await refused(channel, method, bytes(MESSAGE_BYTES + 1)))
        dropped = await refused(channel, "Read", bytes(ACCEPTED_BYTES + 1))
        assert dropped[0] == "RESOURCE_EXHAUSTED" and len(audit.since()) == 3, "gRPC's own limit: nobody is told"

    events = served(tmp_path, job, interceptors=interceptors)
    words = f"SERVER: Received message larger than max ({MESSAGE_BYTES + 1} vs. {MESSAGE_BYTES})"
    assert said == [("RESOURCE_EXHAUSTED", words)] * 3
    told = [(event.kind, json.loads(event.detail_json)) for event in events]
    assert [(kind, each["method"], each["bytes"]) for kind, each in told] == [
        ("request.refused", f"Files/{method}", MESSAGE_BYTES + 1) for method in ("Read", "Download", "Upload")
    ]


def test_bytes_that_are_no_message_are_the_clients_fault(tmp_path: Path) -> None:
    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        for method in ("Read", "Download", "Upload"):
            assert await refused(channel, method, b"\xff" * 40) == ("INVALID_ARGUMENT", "no message of this method")
        assert (await refused(channel, "Nothing", b""))[0] == "UNIMPLEMENTED"

    events = served(tmp_path, job)
    assert [event.kind for event in events] == ["request.refused"] * 4
    assert json.loads(events[-1].detail_json) == {"method": f"{_FILES}Nothing", "reason": "no such method"}


def test_a_call_that_its_client_gives_up_is_recorded_once(tmp_path: Path) -> None:
    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        read: Any = channel.unary_unary(_FILES + "Read")
        for token in ("right", "wrong"):
            request = pb.FileReadRequest(sandbox_id="own", path="never").SerializeToString()
            call = read(request, metadata=((SANDBOX_TOKEN, token),))
            await asyncio.sleep(0.2)
            call.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await read(pb.FileReadRequest(path="never").SerializeToString(), timeout=0.2)
        await read(pb.FileReadRequest(path="at once").SerializeToString())
        while len(audit.since()) < 3:
            await asyncio.sleep(0.02)

    events = served(tmp_path, job)
    assert [(event.kind, event.sandbox_id) for event in events] == [
        ("call.abandoned", "own"),
        ("call.abandoned", ""),
        ("call.abandoned", ""),
    ]
    assert all(json.loads(event.detail_json)["seconds"] >= 0.1 for event in events)


def test_a_reader_that_takes_nothing_is_recorded_once_and_one_that_reads_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(malformed, "STALLED_S", 0.5)

    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        download: Any = channel.unary_stream(_FILES + "Download")
        request = pb.PathRequest(sandbox_id="own").SerializeToString()
        metadata = ((SANDBOX_TOKEN, "right"),)
        slow = download(request, metadata=metadata)
        async for _ in slow:
            await asyncio.sleep(0.02)  # longer than STALLED_S in all
        assert not audit.since()
        stalled = download(request, metadata=metadata)
        await stalled.read()
        while not audit.since():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.7)
        stalled.cancel()

    (event,) = served(tmp_path, job)
    assert (event.kind, event.sandbox_id) == ("client.stalled", "own")
    assert json.loads(event.detail_json)["method"] == "Files/Download"


def test_what_one_address_does_is_not_counted_against_another(tmp_path: Path) -> None:
    """Wrong keys over TCP, and then those of a client elsewhere, which the same event log is told of."""

    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        for _ in range(BURST + 8):
            assert (await refused(channel, "Read", b""))[0] == "UNAUTHENTICATED"
        caller.answering(Peer("ipv4:10.9.9.9:1"), "Files/Read")
        assert audit.record("auth.denied", "", what="key") is not None

    events = served(tmp_path, job, address="127.0.0.1:0", interceptors=(lambda audit: key_check((b"k" * 16,), audit),))
    peers = [json.loads(event.detail_json)["peer"] for event in events if event.kind == "auth.denied"]
    assert peers == ["127.0.0.1"] * BURST + ["10.9.9.9"]


def test_observers_get_messages_only_and_the_code_of_a_refusal(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Seeing:
        def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
            return lambda code: seen.append((type(request).__name__, code))

    async def job(channel: grpc.aio.Channel, audit: AuditLog) -> None:
        for metadata, data in (((), b""), ((("authorization", "Bearer " + "k" * 16),), b"\xff" * 40)):
            call: Any = channel.unary_unary(_FILES + "Read")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(data, metadata=metadata)
        upload: Any = channel.stream_unary(_FILES + "Upload")
        await upload(iter([pb.UploadChunk(data=b"x").SerializeToString()]), metadata=metadata)

    interceptors = (lambda audit: Observing([Seeing()]), lambda audit: key_check((b"k" * 16,), audit))
    served(tmp_path, job, interceptors=interceptors)
    assert seen == [("NoneType", "UNAUTHENTICATED"), ("NoneType", "INVALID_ARGUMENT"), ("Stream", "OK")]


class Peer:
    """As much of a gRPC context as tells who calls."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


@pytest.mark.parametrize(
    ("peer", "source", "address"),
    [
        ("ipv4:10.0.0.3:50123", "10.0.0.3", "10.0.0.3"),
        ("ipv6:%5B2001:db8::17%5D:60946", "2001:db8::/64", "2001:db8::17"),
        ("ipv6:[2001:db8::ff:1]:1", "2001:db8::/64", "2001:db8::ff:1"),
        ("ipv6:%5B::ffff:10.0.0.3%5D:1", "10.0.0.3", "::ffff:10.0.0.3"),
        ("unix:", "Files/Read", ""),
    ],
)
def test_a_source_is_an_address_its_network_or_on_a_unix_socket_the_method(
    peer: str, source: str, address: str
) -> None:
    async def found() -> tuple[str, str]:
        caller.answering(Peer(peer), "Files/Read")
        return caller.source()

    assert asyncio.run(found()) == (source, address)
    assert caller.source() == ("", ""), "outside of a call there is none"
