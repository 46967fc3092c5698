"""Three kinds of attack: a hostile request, a broken connection, and a sandbox that sends false data to the server."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import message_factory

from benchmarks.envd_hostile import METHODS, Hostile
from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.pb import envd_pb2 as pb
from envd.guest.link import GuestLink
from envd.guest.protocol import HEAD

UNPARSED = "DecodeError"
"""Part of gRPC's own reply to bytes that are no message; the services never see them."""
_CUT = "Internal error from Core"
"""Part of the client's error for a stream that the server closed first."""
_DEADLINE_S = 40.0
_STREAM_S = 0.05
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def send(channel: grpc.aio.Channel, request: Hostile, chance: random.Random) -> tuple[str, str]:
    """Send one request. Returns the status name, and the server's message if the error was unexpected."""
    method = METHODS[request.path]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(request.path)
    given: Any = iter(request.messages) if method.client_streaming else request.messages[0]
    try:
        if method.server_streaming:
            await _read_some(call(given, metadata=request.metadata, timeout=_DEADLINE_S))
        elif method.client_streaming and chance.random() < 0.2:
            half = call(metadata=request.metadata, timeout=_DEADLINE_S)
            await asyncio.sleep(_STREAM_S)
            half.cancel()
        else:
            reply = await call(given, metadata=request.metadata, timeout=_DEADLINE_S)
            await _clear(channel, message_factory.GetMessageClass(method.output_type).FromString(reply))
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        unthought = error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) and not any(
            each in details for each in (UNPARSED, _CUT)
        )
        return error.code().name, f"{error.code().name} {details}"[:300] if unthought else ""
    except (asyncio.CancelledError, asyncio.InvalidStateError):
        return "CANCELLED", ""
    return "OK", ""


async def _read_some(call: Any) -> None:
    """Read the beginning of a stream, then cancel it."""
    try:
        async with asyncio.timeout(_STREAM_S):
            for _ in range(5):
                if await call.read() is grpc.aio.EOF:
                    return
    except TimeoutError:
        pass
    finally:
        call.cancel()


async def _clear(channel: grpc.aio.Channel, reply: Any) -> None:
    """Delete the results of a request that succeeded by chance."""
    made = [reply] if isinstance(reply, pb.CreateReply) else []
    if isinstance(reply, operations_pb.CreateBatchReply):
        made = [each.created for each in reply.results if each.HasField("created")]
    stub = rpc.OperationsStub(channel)  # type: ignore[no-untyped-call]
    if made:
        ids, tokens = [each.sandbox_id for each in made], [each.token for each in made]
        await stub.DeleteBatch(operations_pb.DeleteBatchRequest(sandbox_ids=ids, tokens=tokens), timeout=_DEADLINE_S)
    if isinstance(reply, operations_pb.SnapshotReply):
        await stub.DeleteSnapshot(
            operations_pb.DeleteSnapshotRequest(snapshot_id=reply.snapshot_id), timeout=_DEADLINE_S
        )


async def break_connection(address: str, chance: random.Random) -> None:
    """Send bytes that are no valid HTTP/2 and abort the connection. address: `unix:/path`."""
    with suppress(OSError):
        _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        rubbish = chance.randbytes(chance.choice((0, 9, 300, 20_000)))
        writer.write(chance.choice((b"", _PREFACE, _PREFACE[:10])) + rubbish)
        if chance.random() < 0.5:
            await asyncio.sleep(0.01)
        writer.transport.abort()


async def lying_guest(chance: random.Random) -> None:
    """Send a request to a guest that replies with random frames.

    Raises SandboxGone or a file error, as for any broken guest.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    link = await GuestLink.over_socket(ours, patience_s=1.0)
    try:
        asks = (link.stat("."), link.read("f"), link.list("."), link.shell([("true", 1.0)]), link.write("f", b"x"))
        asking = asyncio.ensure_future(asyncio.gather(*asks, return_exceptions=False))
        with suppress(OSError):
            for _ in range(chance.randint(1, 6)):
                body = chance.randbytes(chance.choice((0, 1, 8, 60, 3000)))
                length = chance.choice((len(body) + 5, len(body) + 5, chance.randrange(1 << 32)))
                frame = (
                    HEAD.pack(length, chance.randint(0, 7), chance.choice((100, 101, 102, chance.randrange(256))))
                    + body
                )
                await asyncio.get_running_loop().sock_sendall(theirs, frame)
        theirs.close()
        async with asyncio.timeout(10):
            await asking
    finally:
        link.close()
        theirs.close()
        await link.closed()
