"""The Processes service: programs in a sandbox. Output is read by byte offsets, so that a reader can reconnect."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from envd.errors import EnvdError, FileError
from envd.guest.link import GuestLink, OutputChunk, ProcessState
from envd.guest.protocol import CHUNK
from envd.server.admission import check_env
from envd.server.calls import Context, Service, streaming, unary
from envd.server.live import Live
from envd.server.operations.service_files import plain
from envd.server.operations.states import require

_RING, _MAX_RING = 256 * 1024, 16 * 1024 * 1024
_POLL_S = 30.0
"""Duration of one long poll for output, in seconds."""
_MAX_TIMEOUT_S = 365 * 24 * 3600.0
_LAST_SIGNAL = 64
_CHANNELS = {1: "stdout", 2: "stderr"}


class ProcessesService(Service, rpc.ProcessesServicer):
    """Servicer for processes of sandboxes. It needs rules that allow `exec`."""

    @unary
    async def Start(self, request: pb.ProcessStartRequest, context: Context) -> pb.ProcessState:
        """Start a program, which runs until it exits, its timeout expires or the sandbox ends."""
        if not request.arguments or not request.arguments[0]:
            raise EnvdError("arguments are empty: name a program first")
        if not 0 <= request.timeout_s <= _MAX_TIMEOUT_S:
            raise EnvdError(f"timeout_s is {request.timeout_s:g}: it must be 0 to {_MAX_TIMEOUT_S:g}")
        check_env(request.env)
        pty = request.HasField("pty")
        where = f" in {request.directory}" if request.directory else ""
        async with self._guest(request, context, request.arguments[0] + where) as (live, guest):
            if pty:
                require(live, "pty")
            process, _ = await guest.start(
                list(request.arguments),
                env=dict(request.env),
                directory=request.directory,
                pty=pty,
                stdin=request.stdin,
                rows=min(request.pty.rows or 24, 0xFFFF),
                columns=min(request.pty.columns or 80, 0xFFFF),
                timeout_s=request.timeout_s,
                ring=min(request.ring_bytes or _RING, _MAX_RING),
            )
            return _state(await guest.wait(process))

    @unary
    async def List(self, request: pb.ProcessListRequest, context: Context) -> pb.ProcessListReply:
        """List the started processes that the agent still knows."""
        async with self._guest(request, context) as (_, guest):
            return pb.ProcessListReply(processes=[_state(each) for each in await guest.processes()])

    @streaming
    async def Connect(self, request: pb.ProcessConnectRequest, context: Context) -> AsyncIterator[pb.ProcessEvent]:
        """Stream the output of both channels from the given offsets, then the process's final state.

        The stream waits through a pause. It ends with FAILED_PRECONDITION if the sandbox is hibernated: connect again
        after Resume.
        """
        live = self.live(request, context)
        self.tool_allowed(live, "exec")
        offsets = {1: request.stdout_offset, 2: request.stderr_offset}
        polls: dict[int, asyncio.Task[OutputChunk | None]] = {}
        try:
            while offsets:
                for channel in offsets.keys() - polls.keys():
                    polls[channel] = asyncio.ensure_future(
                        self._output(live, request.process, channel, offsets[channel])
                    )
                await asyncio.wait(polls.values(), return_when=asyncio.FIRST_COMPLETED)
                for channel in [channel for channel, poll in polls.items() if poll.done()]:
                    chunk = polls.pop(channel).result()
                    if chunk is None:
                        continue
                    if (dropped := chunk.start - offsets[channel]) > 0:
                        self.sandboxes.audit.record(
                            "limit.output", live.identity, process=request.process, bytes=dropped
                        )
                    if chunk.data:
                        yield pb.ProcessEvent(channel=_CHANNELS[channel], offset=chunk.start, data=chunk.data)
                    offsets[channel] = chunk.start + len(chunk.data)
                    if chunk.ended:
                        del offsets[channel]
        finally:
            for poll in polls.values():
                poll.cancel()
        ended = await self._ended(live, request.process)
        if ended.exit_code < 0:
            self.sandboxes.sign_of_limit(live)
        yield pb.ProcessEvent(ended=ended)

    @unary
    async def Stdin(self, request: pb.ProcessStdinRequest, context: Context) -> pb.ProcessState:
        """Write to a program's standard input; `accepted` is the number of bytes that were taken."""
        async with self._guest(request, context) as (_, guest):
            accepted = await guest.stdin(request.process, request.data[:CHUNK])
            return _state(await guest.wait(request.process), accepted)

    @unary
    async def CloseStdin(self, request: pb.ProcessRequest, context: Context) -> pb.ProcessState:
        """Close a program's standard input."""
        async with self._guest(request, context) as (_, guest):
            await guest.close_stdin(request.process)
            return _state(await guest.wait(request.process))

    @unary
    async def Signal(self, request: pb.ProcessSignalRequest, context: Context) -> pb.ProcessState:
        """Send a signal to a program; with `tree`, also to all processes that it started."""
        if not 0 < request.signal <= _LAST_SIGNAL:
            raise EnvdError(f"signal is {request.signal}: it must be 1 to {_LAST_SIGNAL}")
        async with self._guest(request, context) as (_, guest):
            await guest.signal(request.process, request.signal, tree=request.tree)
            return _state(await guest.wait(request.process))

    @unary
    async def Resize(self, request: pb.ProcessResizeRequest, context: Context) -> pb.ProcessState:
        """Set the size of a program's terminal."""
        if not (0 < request.size.rows <= 0xFFFF and 0 < request.size.columns <= 0xFFFF):
            raise EnvdError(
                f"a terminal of {request.size.rows} rows and {request.size.columns} columns: both are 1 to 65535"
            )
        async with self._guest(request, context) as (_, guest):
            await guest.resize(request.process, request.size.rows, request.size.columns)
            return _state(await guest.wait(request.process))

    async def _output(self, live: Live, process: int, channel: int, offset: int) -> OutputChunk | None:
        """Next output of a channel; None if a state change of the sandbox interrupted the poll."""
        guest = await live.guest_soon()
        with _refused(f"process {process}"):
            return await live.poll(guest.output(process, channel, offset, wait_s=_POLL_S))

    async def _ended(self, live: Live, process: int) -> pb.ProcessState:
        while True:
            guest = await live.guest_soon()
            with _refused(f"process {process}"):
                state = await live.poll(guest.wait(process, wait_s=_POLL_S))
            if state is not None and not state.running:
                return _state(state)

    @asynccontextmanager
    async def _guest(self, request: Any, context: Context, what: str = "") -> AsyncIterator[tuple[Live, GuestLink]]:
        """Sandbox that a request names, and its agent. Raises RulesDenied if the rules forbid `exec`."""
        live = self.live(request, context)
        self.tool_allowed(live, "exec")
        with _refused(what or f"process {getattr(request, 'process', '')}"):
            async with live.using() as guest:
                yield live, guest


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn the guest's OSError into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError.of(error.errno or errno.EIO, what) from error


def _state(state: ProcessState, accepted: int = 0) -> pb.ProcessState:
    return pb.ProcessState(
        process=state.process,
        pid=state.pid,
        state="running" if state.running else "exited",
        exit_code=state.code,
        timed_out=state.timed_out,
        arguments=map(plain, state.argv),
        stdout_bytes=state.stdout,
        stderr_bytes=state.stderr,
        accepted=accepted,
    )
