"""Move a sandbox to another server, where it continues under the same id and token.

    here: quiet, saved, frozen --header, tar stream--> there: restored --> here: destroyed
                  any failure: thawed                  the sender has gone: destroyed

The sandbox runs in one place only: here until the other server has confirmed that it has the sandbox. The sandbox is
frozen only after that server has answered once, and each later step has a deadline.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_operations_pb2_grpc as operations_rpc
from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.connection import SANDBOX_TOKEN, Access, Metadata
from envd.errors import EnvdError, MigrationError, ServerBusy
from envd.server.admission import Wanted
from envd.server.live import Live
from envd.server.operations.stateflow import pack, unpack
from envd.server.operations.states import States, require
from envd.server.sandboxes import Sandboxes
from envd.server.snapshots import remove_tree

MOVE_S = 600.0
"""Maximum duration of a move, in seconds."""
_UNSURE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}
"""Status codes after which the sandbox may have arrived: the other server's answer was lost."""
_CONNECT_S, _SETTLE_S = 10.0, 10.0
_IDLE_S = 30.0
"""Maximum time, in seconds, without progress in sending or receiving the state."""
_RESTORE_S = 180.0
"""Maximum time, in seconds, for the other server to start the sandbox from its state. A machine with emulated cores
takes a minute.
"""
_MOST_ARRIVING = 64
"""Maximum number of sandboxes received at the same time; each holds a thread and a directory."""
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_SPARE_BYTES = 256 * 1024 * 1024
"""Bytes that a received state may have beyond the memory and disk limits of its sandbox."""


@dataclass(frozen=True)
class Moved:
    """Bytes and seconds of a move, and the kinds of state that it lost."""

    bytes: int
    seconds: float
    lost: tuple[str, ...]


class Migration:
    """Both sides of a move: send and receive sandboxes."""

    def __init__(self, sandboxes: Sandboxes, states: States, access: Access = Access()) -> None:
        """access: TLS files for other servers; the key comes with each request."""
        self._sandboxes, self._states, self._access = sandboxes, states, access
        self._arriving = 0

    async def send(self, live: Live, target: str, key: str) -> Moved:
        """Move a sandbox to the server at `target`. Raises MigrationError; the sandbox then continues here."""
        return await self._sandboxes.finished(self._send(live, target, replace(self._access, key=key or None)))

    async def receive(self, chunks: AsyncIterator[operations_pb.SnapshotChunk]) -> Live:
        """Receive and start a sandbox from another server. Raises EnvdError, and then keeps nothing of the sandbox."""
        if self._arriving >= _MOST_ARRIVING:
            raise ServerBusy(
                f"{self._arriving} sandboxes are being received already: retry when one of them has arrived"
            )
        self._arriving += 1
        try:
            return await self._receive(chunks)
        finally:
            self._arriving -= 1

    async def _receive(self, chunks: AsyncIterator[operations_pb.SnapshotChunk]) -> Live:
        first = await _next(chunks) or operations_pb.SnapshotChunk()
        if not first.HasField("header"):
            raise EnvdError("the first message of Receive holds no header: send one")
        header = first.header
        if not _HOST_NAME.fullmatch(header.host_name or "sandbox"):
            raise EnvdError(f"host name {header.host_name[:80]!r} is none that an envd server gives")
        if not header.expires_in_s >= 0:  # NaN as well, with which it would never end
            raise EnvdError(f"expires_in_s={header.expires_in_s:g}: must be at least 0")
        digest = await self._sandboxes.templates.put(header.template_files)
        wanted = replace(Wanted.of(header), template=digest)
        _, spec, _ = self._sandboxes.plan(wanted)  # raises before any state is read
        room = (spec.limits.memory_mb + spec.limits.disk_mb << 20) + _SPARE_BYTES
        into = self._sandboxes.snapshots.hold()
        try:
            async with asyncio.timeout(MOVE_S):
                await unpack(_data(first, chunks), into, room)
        except BaseException as error:
            await remove_tree(into)
            if isinstance(error, TimeoutError):
                raise EnvdError(f"the state did not arrive within {MOVE_S:g} s: send it again") from error
            raise
        live = await self._states.handed_over(self._restored(wanted, into, header), self._sandboxes.end)
        self._sandboxes.expire_in(live, header.expires_in_s)
        return live

    async def _restored(self, wanted: Wanted, state: Path, header: operations_pb.ReceiveHeader) -> Live:
        """Start the sandbox, then remove its state. Continues without the sender: the starting box reads the state."""
        like, host_name = (header.sandbox_id, header.token), header.host_name or "sandbox"
        try:
            return await self._sandboxes.restore(wanted, state, host_name=host_name, like=like)
        finally:
            await remove_tree(state)

    async def _send(self, live: Live, target: str, access: Access) -> Moved:
        require(live, "migrate")
        if not target:
            raise EnvdError("target is empty: name the other server, unix:/path or host:port")
        started = time.monotonic()
        async with access.channel(target) as channel:
            there = _There(target, channel, access.metadata)
            await there.meet(live)
            async with live.change(quiet=True):
                size, lost = await self._give(live, there)
                self._sandboxes.forget(live, f"it was moved to {target[:200]}")
        await self._sandboxes.clear(live)
        return Moved(size, time.monotonic() - started, lost)

    async def _give(self, live: Live, there: _There) -> tuple[int, tuple[str, ...]]:
        """Save and send a sandbox, within a state change; return the bytes sent and the kinds of state lost.

        The sandbox continues here if this fails.
        """
        into = self._sandboxes.snapshots.hold()
        frozen = False
        try:
            lost = await self._states.save(live, into)
            frozen = await self._states.freeze(live)
            header = await self._header(live)
            live.require_alive()
            size = await there.take(header, into)
            if live.ended:  # the owner or the lifetime ended the sandbox while it was sent
                await there.drop(header)
                live.require_alive()
            return size, lost
        except BaseException:
            if frozen:
                await self._states.thaw(live)
            raise
        finally:
            await remove_tree(into)

    async def _header(self, live: Live) -> operations_pb.ReceiveHeader:
        header = await self._states.header_of(live)
        header.sandbox_id, header.token = live.identity, live.token
        header.host_name = live.spec.host_name
        header.expires_in_s = max(live.expires - time.monotonic(), 1)
        return header


@dataclass(frozen=True)
class _There:
    """The server that a sandbox is moved to."""

    target: str
    channel: grpc.aio.Channel
    metadata: Metadata

    @property
    def _sandboxes(self) -> Any:
        return rpc.SandboxesStub(self.channel)  # type: ignore[no-untyped-call]

    @property
    def _operations(self) -> Any:
        return operations_rpc.OperationsStub(self.channel)  # type: ignore[no-untyped-call]

    async def meet(self, live: Live) -> None:
        """Check that the server answers and has the sandbox's backend. Raises MigrationError."""
        try:
            info = await self._operations.Info(operations_pb.InfoRequest(), metadata=self.metadata, timeout=_CONNECT_S)
        except grpc.aio.AioRpcError as error:
            raise self._refused(live.identity, _words(error.code(), error.details())) from error
        if live.backend.name not in {each.name for each in info.backends}:
            raise self._refused(live.identity, f"it has no {live.backend.name} backend")

    async def take(self, header: operations_pb.ReceiveHeader, state: Path) -> int:
        """Send a sandbox and return the bytes sent. Raises MigrationError once it is certain that it did not arrive."""
        started = time.monotonic()
        call = self._operations.Receive(metadata=self.metadata, timeout=MOVE_S)
        try:
            size = await _send_all(call, header, state)
            async with asyncio.timeout(_RESTORE_S):
                await call.done_writing()
                await call
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError, EnvdError) as error:
            said, unsure = await _reason(call, error)
            call.cancel()
            if unsure and await self._arrived(header, time.monotonic() - started):
                return 0
            raise self._refused(header.sandbox_id, said) from error
        except BaseException:
            call.cancel()
            raise
        return size

    async def drop(self, header: operations_pb.ReceiveHeader) -> None:
        """End the sandbox on the other server. If that server can't be reached, the sandbox ends with its lifetime."""
        with suppress(grpc.aio.AioRpcError):
            request = pb.DeleteRequest(sandbox_id=header.sandbox_id)
            await self._sandboxes.Delete(request, metadata=self._as_owner(header), timeout=_SETTLE_S)

    async def _arrived(self, header: operations_pb.ReceiveHeader, elapsed_s: float) -> bool:
        """Whether the server has the sandbox from this move, although its answer was lost.

        False if the server can't be reached.
        """
        request = pb.GetRequest(sandbox_id=header.sandbox_id)
        with suppress(grpc.aio.AioRpcError):
            there = await self._sandboxes.Get(request, metadata=self._as_owner(header), timeout=_SETTLE_S)
            return bool(there.age_s <= elapsed_s + _SETTLE_S)
        return False

    def _as_owner(self, header: operations_pb.ReceiveHeader) -> Metadata:
        return (*self.metadata, (SANDBOX_TOKEN, header.token))

    def _refused(self, identity: str, said: str) -> MigrationError:
        return MigrationError(f"{self.target[:200]} did not take sandbox {identity} over ({said}): it goes on here")


async def _send_all(call: Any, header: operations_pb.ReceiveHeader, state: Path) -> int:
    """Send header and state; return the state's bytes. Raises EnvdError if no byte is accepted for _IDLE_S seconds."""
    size = 0
    try:
        await asyncio.wait_for(call.write(operations_pb.SnapshotChunk(header=header)), _IDLE_S)
        async with aclosing(pack(state)) as stream:
            async for data in stream:
                size += len(data)
                await asyncio.wait_for(call.write(operations_pb.SnapshotChunk(data=data)), _IDLE_S)
    except TimeoutError as error:
        raise EnvdError(f"it accepted no data of the state for {_IDLE_S:g} s") from error
    return size


async def _reason(call: Any, error: BaseException) -> tuple[str, bool]:
    """Reason of a failed send, and whether the sandbox may have arrived nevertheless.

    The status is read from the call, since a write after the other server's refusal does not raise that refusal.
    """
    if isinstance(error, EnvdError):
        return str(error), False
    if isinstance(error, TimeoutError):
        return f"it did not start within {_RESTORE_S:g} s", True
    code = await call.code()
    return _words(code, await call.details()), code in _UNSURE


def _words(code: grpc.StatusCode, details: str | None) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return (details or code.name)[:500]


async def _data(
    first: operations_pb.SnapshotChunk, chunks: AsyncIterator[operations_pb.SnapshotChunk]
) -> AsyncIterator[bytes]:
    if first.data:
        yield first.data
    while (chunk := await _next(chunks)) is not None:
        yield chunk.data


async def _next(chunks: AsyncIterator[operations_pb.SnapshotChunk]) -> operations_pb.SnapshotChunk | None:
    """The next message; None at the end. Raises EnvdError if the sender sends nothing for _IDLE_S seconds."""
    try:
        async with asyncio.timeout(_IDLE_S):
            return await anext(chunks, None)
    except TimeoutError as error:
        raise EnvdError(f"the sender of a sandbox sent nothing for {_IDLE_S:g} s: send it again") from error
