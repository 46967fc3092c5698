"""The server's side of the verifier's zygote: start it, request sandboxes and talk to the processes that it forked."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envd.backends.base import Runtime
from envd.backends.helper import send_to_helper, start_helper, wait_for_helper
from envd.errors import SandboxGone, SandboxStartError
from envd.sandbox import wire
from envd.types import Limits

_START_TIMEOUT_S = 60.0
_TOO_LOW = "a sandbox could not start ({}): its memory or pid limit may be too low"
_MIB = 1024 * 1024


class Link:
    """The server's end of one sandbox's connection. Requests are answered in order, one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kill: Callable[[], None]) -> None:
        self._reader, self._writer, self._kill = reader, writer, kill
        self._lock = asyncio.Lock()

    async def ask(self, header: dict[str, Any], blob: bytes = b"", *, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send one request and return its reply.

        Raises SandboxGone after a failure or a timeout. The sandbox is then killed, as it is if the caller is
        cancelled.
        """
        async with self._lock:
            try:
                async with asyncio.timeout(timeout_s):
                    self._writer.write(wire.pack(header, blob))
                    await self._writer.drain()
                    header_length, blob_length = wire.lengths(await self._reader.readexactly(wire.HEAD.size))
                    body = await self._reader.readexactly(header_length + blob_length)
                reply = json.loads(body[:header_length])
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self._end()
                raise SandboxGone("the sandbox ended: it reached a limit, crashed or hung") from error
            except asyncio.CancelledError:
                self._end()  # nobody reads the reply
                raise
        if not isinstance(reply, dict):
            self._end()
            raise SandboxGone("the sandbox sent an invalid reply")
        if "failed" in reply:
            self._end()
            raise SandboxGone(f"the sandbox failed: {reply['failed']}")
        return reply, body[header_length:]

    def close(self) -> None:
        """Close the connection. The process at its other end, and its sandbox, exit once it waits for a request."""
        self._writer.close()

    def _end(self) -> None:
        self.close()
        self._kill()  # a busy process does not notice that the connection is closed


class Zygote:
    """A running zygote process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._count = 0
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(control.fileno(), self._hear)

    @classmethod
    async def start(cls, run_dir: Path, name: str, backend: str) -> Zygote:
        """Start a zygote and wait until it can fork. Raises BackendUnavailable with the zygote's error if it can't."""
        arguments = [str(run_dir), name, "--backend", backend]
        env = {"PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        what = f"the verifier ({backend})"
        process, control, _ = await start_helper(what, "envd.sandbox.zygote", *arguments, env=env)
        return cls(process, control)

    async def spawn(
        self, template: str, limits: Limits, env: dict[str, str], *, runtime: Runtime | None = None, cold: bytes = b""
    ) -> Link:
        """Fork a sandbox and return its link once it is ready. Raises SandboxStartError.

        cold: the verifier's modules (guest_bundle.py), which a fresh interpreter is given instead of a fork's.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._count += 1
        name = f"verifier-{self._count}"
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
            try:
                await self._request(name, template, limits, theirs, runtime, len(cold))
            except BaseException:
                writer.close()
                raise
        link = Link(reader, writer, functools.partial(self._kill, name))
        try:
            if cold:
                writer.write(cold)
            await link.ask({"op": "init", "env": env}, timeout_s=_START_TIMEOUT_S)
        except SandboxGone as error:
            raise SandboxStartError(_TOO_LOW.format(error)) from error
        return link

    async def died(self) -> str:
        """Wait until the zygote ends by itself, and return an error text."""
        await self._ended.wait()
        return "the verifier's zygote died: restart envd; the kernel's log tells whether memory ran out"

    async def _request(
        self, name: str, template: str, limits: Limits, theirs: socket.socket, runtime: Runtime | None, cold: int
    ) -> None:
        request: dict[str, Any] = {
            "id": name,
            "template": template,
            "runtime": runtime.digest if runtime else "",
            "root": bool(runtime and runtime.is_root),
            "env": runtime.environment({}) if runtime else {},
            "cold": cold,
            "memory": limits.memory_mb * _MIB,
            "pids": limits.pids,
            "cpu": limits.cpu,
            "disk": limits.disk_mb * _MIB,
        }
        data = json.dumps(request).encode()
        if len(data) > wire.MAX_REQUEST:
            raise SandboxStartError(
                f"a verification could not start: with the variables of runtime {request['runtime'][:12]} its request"
                f" has {len(data)} bytes, more than {wire.MAX_REQUEST}: shorten them"
            )
        try:
            await send_to_helper(self._control, data, [theirs.fileno()])
        except OSError as error:
            raise SandboxStartError(f"the process that starts sandboxes ended ({error}): restart envd") from error

    def _kill(self, name: str) -> None:
        try:
            self._control.send(json.dumps({"kill": name}).encode())
        except BlockingIOError:
            asyncio.get_running_loop().call_later(0.01, self._kill, name)  # the socket's queue is full
        except OSError:
            pass  # the zygote and all processes that it forked have ended

    def _hear(self) -> None:
        """Note that the zygote has ended: after its first message it sends nothing, only end of file or an error."""
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._ended.set()

    async def stop(self) -> None:
        """Close the control connection and wait until the zygote has cleaned up."""
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
        await wait_for_helper(self._process)
