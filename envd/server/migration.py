"""Moving a sandbox to another server, which goes on with it under the same id and token.

    here: quiet, saved, frozen --header, tar stream--> there: restored --> here: destroyed
                  any failure: thawed                  the sender has gone: destroyed

It runs in one place only: here until the other server has said that it has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.connection import SANDBOX_TOKEN, Access, Metadata
from envd.errors import EnvdError, MigrationError
from envd.server.admission import Wanted
from envd.server.live import Live
from envd.server.sandboxes import Sandboxes
from envd.server.snapshots import remove_tree
from envd.server.stateflow import pack, unpack
from envd.server.states import States, require

MOVE_S = 600.0
"""How long a whole move may take."""
_UNSURE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""The other server did not say no: its answer was lost."""
_FIRST_S, _SETTLE_S = 30.0, 10.0
_SPARE_BYTES = 256 * 1024 * 1024
"""Of a received state, beside the memory and the disk that its limits allow."""


@dataclass(frozen=True)
class Moved:
    """What a move took."""

    bytes: int
    seconds: float
    lost: tuple[str, ...]


class Migration:
    """Both sides of moving sandboxes."""

    def __init__(self, sandboxes: Sandboxes, states: States, access: Access = Access()) -> None:
        """access: how other servers are reached; the key comes with each request."""
        self._sandboxes, self._states, self._access = sandboxes, states, access

    async def send(self, live: Live, target: str, key: str) -> Moved:
        """Move a sandbox there. Raises MigrationError; it goes on here then."""
        return await self._sandboxes.finished(self._send(live, target, replace(self._access, key=key or None)))

    async def receive(self, chunks: AsyncIterator[pb.SnapshotChunk]) -> Live:
        """Take a sandbox over. Raises EnvdError, and keeps nothing of it then."""
        async with asyncio.timeout(_FIRST_S):
            first = await anext(chunks, pb.SnapshotChunk())
        if not first.HasField("header"):
            raise EnvdError("the first message of Receive holds no header: send one")
        header = first.header
        digest = await self._sandboxes.templates.put(header.template_files)
        wanted = replace(Wanted.of(header), template=digest)
        _, spec, _ = self._sandboxes.plan(wanted)  # refused before anything is read
        room = (spec.limits.memory_mb + spec.limits.disk_mb << 20) + _SPARE_BYTES
        into = self._sandboxes.snapshots.hold()
        try:
            async with asyncio.timeout(MOVE_S):
                await unpack(_data(first, chunks), into, room)
            like = header.sandbox_id, header.token
            restoring = self._sandboxes.restore(wanted, into, host_name=header.host_name or "sandbox", like=like)
            live = await self._states.handed_over(restoring)
        finally:
            await remove_tree(into)
        self._sandboxes.expire_in(live, header.expires_in_s)
        return live

    async def _send(self, live: Live, target: str, access: Access) -> Moved:
        require(live, "migrate")
        started = time.monotonic()
        async with live.change(quiet=True):
            into = self._sandboxes.snapshots.hold()
            frozen = False
            try:
                lost = await self._states.save(live, into)
                frozen = await self._states.freeze(live)
                header = await self._header(live)
                size = await self._hand_over(target, access, header, into)
            except BaseException:
                if frozen:
                    await self._states.thaw(live)
                raise
            finally:
                await remove_tree(into)
            self._sandboxes.forget(live, f"it was moved to {target[:200]}")
        await self._sandboxes.clear(live)
        return Moved(size, time.monotonic() - started, lost)

    async def _header(self, live: Live) -> pb.ReceiveHeader:
        header = await self._states.header_of(live)
        header.sandbox_id, header.token = live.identity, live.token
        header.host_name = live.spec.host_name
        header.expires_in_s = max(live.expires - time.monotonic(), 1)
        return header

    async def _hand_over(self, target: str, access: Access, header: pb.ReceiveHeader, state: Path) -> int:
        """Send it and return its bytes. Raises MigrationError once it is known that it did not arrive."""
        async with access.channel(target) as channel:
            stub = rpc.SandboxesStub(channel)  # type: ignore[no-untyped-call]
            started = time.monotonic()
            call = stub.Receive(metadata=access.metadata, timeout=MOVE_S)
            try:
                size = await _send_all(call, header, state)
                await call
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EnvdError) as error:
                said, unsure = await _reason(call, error)
                call.cancel()
                if unsure and await _arrived(stub, access.metadata, header, time.monotonic() - started):
                    return 0
                words = f"{target[:200]} did not take sandbox {header.sandbox_id} over ({said}): it goes on here"
                raise MigrationError(words) from error
            except BaseException:
                call.cancel()
                raise
        return size


async def _send_all(call: Any, header: pb.ReceiveHeader, state: Path) -> int:
    size = 0
    await call.write(pb.SnapshotChunk(header=header))
    async for data in pack(state):
        size += len(data)
        await call.write(pb.SnapshotChunk(data=data))
    await call.done_writing()
    return size


async def _arrived(stub: Any, metadata: Metadata, header: pb.ReceiveHeader, elapsed_s: float) -> bool:
    """Whether the other server has it, since this move began, although its answer was lost. Where it can't be asked, it has not."""
    request = pb.GetRequest(sandbox_id=header.sandbox_id)
    with suppress(grpc.aio.AioRpcError):
        there = await stub.Get(request, metadata=(*metadata, (SANDBOX_TOKEN, header.token)), timeout=_SETTLE_S)
        return bool(there.age_s <= elapsed_s + _SETTLE_S)
    return False


async def _reason(call: Any, error: BaseException) -> tuple[str, bool]:
    """Why it failed, and whether it may have arrived all the same.

    A write that came after the other server's refusal does not know of that; the call does.
    """
    if isinstance(error, EnvdError):
        return str(error), False
    code = await call.code()
    return str(await call.details() or code.name)[:500], code in _UNSURE


async def _data(first: pb.SnapshotChunk, chunks: AsyncIterator[pb.SnapshotChunk]) -> AsyncIterator[bytes]:
    if first.data:
        yield first.data
    async for chunk in chunks:
        yield chunk.data
