"""QEMU's machine protocol (docs/interop/qmp-spec): one JSON object per line, one command at a time, events between."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from envd.errors import EnvdError, SandboxGone

_LINE = 1024 * 1024
"""Maximum number of bytes of a line: only a compromised QEMU sends more."""


class QmpError(EnvdError):
    """QEMU refused a command."""


class Qmp:
    """Client of a QEMU's monitor. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self.on_event: Callable[[str], None] = lambda name: None
        """Called with the name of each event."""
        self._asked = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._greeted: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._reading = self._loop.create_task(self._read())

    async def greet(self, patience_s: float) -> str:
        """Wait for the greeting and end the negotiation. Returns QEMU's version."""
        async with asyncio.timeout(patience_s):
            hello = await asyncio.shield(self._greeted)
            await self.run("qmp_capabilities")
        version = hello["QMP"]["version"]["qemu"]
        return f"{version['major']}.{version['minor']}.{version['micro']}"

    async def run(self, command: str, *, fd: int | None = None, **arguments: Any) -> Any:
        """Run a command and return its answer. fd: a descriptor to send along. Raises QmpError, SandboxGone."""
        async with self._turn:
            self._asked += 1  # tells this answer from that to an earlier, cancelled command
            line = json.dumps({"execute": command, "arguments": arguments, "id": self._asked}).encode() + b"\n"
            if self._reading.done():
                raise SandboxGone("the virtual machine ended")
            self._answer = self._loop.create_future()
            try:
                if fd is None:
                    await self._loop.sock_sendall(self._sock, line)
                else:
                    socket.send_fds(self._sock, [line], [fd])  # fits: no other data is in transit
                answer = await self._answer
            except OSError as error:
                raise SandboxGone("the virtual machine ended") from error
            finally:
                self._answer = None
        if "error" in answer:
            raise QmpError(f"QEMU refused {command}: {str(answer['error'].get('desc'))[:300]}")
        return answer["return"]

    async def close(self) -> None:
        """Close the monitor's socket."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._sock.close()

    async def _read(self) -> None:
        pending = b""
        try:
            while len(pending) < _LINE:
                data = await self._loop.sock_recv(self._sock, 65536)
                if not data:
                    break
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        self._take(json.loads(line))
        except (OSError, ValueError):
            pass  # QEMU has ended, or sent an invalid message: treat both as its end
        finally:
            for waiting in (self._answer, self._greeted):
                if waiting is not None and not waiting.done():
                    waiting.set_exception(SandboxGone("the virtual machine ended"))
                    waiting.exception()

    def _take(self, said: Any) -> None:
        if not isinstance(said, dict):
            raise ValueError("no object")
        if "QMP" in said and not self._greeted.done():
            self._greeted.set_result(said)
        elif "event" in said:
            self.on_event(str(said["event"]))
        elif said.get("id") == self._asked and self._answer is not None and not self._answer.done():
            self._answer.set_result(said)
