"""The server's end of a sandbox: one method an ask of envd/guest/protocol.py, typed and bounded.

File failures are OSErrors with the guest's errno. `SandboxGone` says that the stream ended, that the guest broke the
protocol or that it hangs; the link is closed then. A call that is cancelled is cancelled in the guest and leaves the
link as it is: a cancelled `shell` ends its commands with all that they started, as a deadline does, and the shell is
started anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from envd.guest import results
from envd.guest.channel import Channel
from envd.guest.file_asks import FileAsks
from envd.guest.protocol import CHUNK, MAX_FRAME, VERSION, Ask, Reader, Writer
from envd.guest.results import (
    Change,
    ChangeKind,
    Entry,
    GuestInfo,
    OutputChunk,
    ProcessState,
    ShellResult,
    milliseconds,
    name,
)

__all__ = ["Change", "ChangeKind", "Entry", "GuestInfo", "GuestLink", "OutputChunk", "ProcessState", "ShellResult"]

PATIENCE_S = 60.0
_MAX_LIMIT = 1024 * 1024
_LENGTH = struct.Struct("<I")


class GuestLink(FileAsks):
    """The server's end of one sandbox's stream. For one event loop; asks may run at the same time."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._shells_end = 0.0

    @classmethod
    async def over_socket(
        cls, sock: socket.socket, *, patience_s: float = PATIENCE_S, escaped: bool = False
    ) -> GuestLink:
        """Over a connected stream socket, which the link owns from now on.

        patience_s: how long an answer may take beyond what its ask waits for. escaped: the agent speaks the escaped
        stream that serial lines and restored snapshots need (envd/guest/escape.py).
        """
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        channel = Channel(patience_s, escaped=escaped)
        connect = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        transport, _ = await connect(lambda: channel, sock=sock)
        channel.write_to(transport)
        return cls(channel)

    @property
    def gone(self) -> str | None:
        """Why the link is closed; None while it works."""
        return self._channel.reason

    def close(self) -> None:
        """Close the stream: the agent at its other end ends with all that it started.

        Asks under way raise SandboxGone.
        """
        self._channel.end("the sandbox was closed")

    async def closed(self) -> None:
        """Wait until the stream is closed, by whomever."""
        await self._channel.ended()

    def hold(self) -> None:
        """The guest is about to be stopped where it stands: asks under way may take without end."""
        self._channel.hold()

    def release(self) -> None:
        """The guest runs again."""
        self._channel.release()

    async def init(
        self, *, host_name: str, env: Mapping[str, str], seed: bytes | None = None, unix_ns: int = 0
    ) -> GuestInfo:
        """Tell the guest who it is; also after a fork or a restore. seed: 32 fresh random bytes when None."""
        values = [name(f"{key}={value}") for key, value in env.items()]
        fields = Writer().data(name(host_name)).data(os.urandom(32) if seed is None else seed).items(values)
        body = await self._channel.ask(Ask.INIT, fields.i64(unix_ns).body())
        reader = self._channel.parsed(Reader, body)
        info = self._channel.parsed(lambda: GuestInfo(reader.u32(), reader.u32()))
        if info.version != VERSION:
            self._channel.end(
                f"the agent speaks version {info.version} of the protocol, the server {VERSION}: rebuild one"
            )
        self._channel.parsed(reader.end)
        return info

    async def shell(self, commands: Sequence[tuple[str, float]], *, limit: int = 16384) -> list[ShellResult]:
        """Run (command, deadline in seconds) pairs in the sandbox's shell; several run at the same time in subshells of
        it.

        limit: bytes of output to keep of each. Raises OSError where no shell can be started.
        """
        if not commands:
            return []
        limit = max(2, min(limit, _MAX_LIMIT))
        fields = Writer().u32(limit).u32(len(commands))
        for command, deadline_s in commands:
            fields.data(name(command)).u32(milliseconds(deadline_s))
        now = asyncio.get_running_loop().time()
        # It queues behind those before it, which have deadlines of their own.
        self._shells_end = max(self._shells_end, now) + max(deadline_s for _, deadline_s in commands)
        bound, waits = len(commands) * (limit + 64), self._shells_end - now
        body = await self._channel.ask(Ask.SHELL, fields.body(), bound=bound, wait_s=waits)
        return self._channel.parsed(results.shell_results, body, len(commands), limit)

    async def warm_shell(self) -> None:
        """Have the shell started before its first command. Raises OSError where it can't be started."""
        body = await self._channel.ask(Ask.SHELL, Writer().u32(2).u32(0).body())
        if body != bytes(4):
            self._channel.broken("a shell without commands has results")

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        directory: str = "",
        pty: bool = False,
        stdin: bool = False,
        rows: int = 24,
        columns: int = 80,
        timeout_s: float = 0.0,
        ring: int = 1024 * 1024,
    ) -> tuple[int, int]:
        """Start a process and return (its number here, its pid in the sandbox).

        ring: bytes of output that are kept for who comes late.
        """
        flags = pty * 1 | stdin * 2
        values = [name(f"{key}={value}") for key, value in (env or {}).items()]
        fields = Writer().items([name(each) for each in argv]).items(values).data(name(directory)).u8(flags)
        fields.u32(rows).u32(columns).u32(milliseconds(timeout_s)).u32(ring)
        reader = Reader(await self._channel.ask(Ask.START, fields.body()))
        started = self._channel.parsed(lambda: (reader.u32(), reader.u32()))
        self._channel.parsed(reader.end)
        return started

    async def output(
        self, process: int, channel: int, offset: int, *, at_most: int = CHUNK, wait_s: float = 0.0
    ) -> OutputChunk:
        """Output from an offset on. channel: 1 standard output, 2 standard error. Waits for some up to wait_s."""
        fields = Writer().u32(process).u8(channel).u64(offset).u32(min(at_most, CHUNK)).u32(milliseconds(wait_s))
        body = await self._channel.ask(Ask.OUTPUT, fields.body(), bound=min(at_most, CHUNK), wait_s=wait_s)
        return self._channel.parsed(results.output_chunk, body, min(at_most, CHUNK))

    async def wait(self, process: int, *, wait_s: float = 0.0) -> ProcessState:
        """The state of a process once it has ended, or after wait_s."""
        fields = Writer().u32(process).u32(milliseconds(wait_s))
        body = await self._channel.ask(Ask.WAIT, fields.body(), bound=MAX_FRAME, wait_s=wait_s)
        return self._channel.parsed(results.only_state, body)

    async def processes(self) -> list[ProcessState]:
        """All that `start` started and the guest still knows."""
        return self._channel.parsed(results.states, await self._channel.ask(Ask.PROCESSES, b"", bound=MAX_FRAME))

    async def stdin(self, process: int, data: bytes) -> int:
        """Write to a process's standard input; returns how much it took, 0 while its pipe is full."""
        body = await self._channel.ask(Ask.STDIN, Writer().u32(process).data(data[:CHUNK]).body())
        (accepted,) = self._channel.parsed(_LENGTH.unpack, body)
        return int(min(accepted, len(data)))

    async def close_stdin(self, process: int) -> None:
        """End a process's standard input."""
        await self._channel.ask_for_nothing(Ask.CLOSE_STDIN, Writer().u32(process).body())

    async def signal(self, process: int, number: int, *, tree: bool = False) -> None:
        """Signal a process; with `tree` all that it started too."""
        await self._channel.ask_for_nothing(Ask.SIGNAL, Writer().u32(process).u32(number).u8(tree).body())

    async def resize(self, process: int, rows: int, columns: int) -> None:
        """Tell a process's terminal its size."""
        await self._channel.ask_for_nothing(Ask.RESIZE, Writer().u32(process).u32(rows).u32(columns).body())
