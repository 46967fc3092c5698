"""Server side of the native spawner: start it, send requests, receive reports (protocol: envd/native/spawn.h)."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from envd.backends.base import Runtime
from envd.backends.helper import start_helper, wait_for_helper
from envd.errors import BackendUnavailable, EnvdError, SandboxStartError
from envd.sandbox.cgroups import remove_groups
from envd.types import Limits

_REQUEST = struct.Struct("<IIQQIIII96s96s96s")
_REPORT = struct.Struct("<IIq240s")
_MAX_NAME = 95
_CREATE, _KILL, _ARCHIVE, _LEAVE = 1, 2, 3, 4
_READY, _STARTED, _FAILED, _ENDED, _ARCHIVED, _REFUSED, _SOCKETS = 1, 2, 3, 4, 5, 6, 7
_READ_ONLY, _RESTORE, _CHANGED, _PROXY, _ROOT = 1, 2, 4, 8, 16
_STOP_S = 15.0
_PERIOD_US = 100_000
_MIB = 1024 * 1024
_OPEN_FILES = 1024


@dataclass
class Started:
    """State of one sandbox, from the spawner's reports."""

    number: int
    ended: asyncio.Future[None]
    """Done when nothing is left of the sandbox."""
    running: asyncio.Future[None]
    """Done when process 1 is known, or the sandbox has ended."""
    pid: int = 0
    """Host pid of its process 1; 0 until the sandbox runs."""
    groups: str = ""
    """Name of its control groups; empty until the sandbox runs."""
    used_before_us: int = 0
    """CPU time in microseconds that the reused groups had counted before this sandbox."""
    on_refused: Callable[[str, int], None] | None = None
    """Called with the name of a refused system call, and the number of refusals since the previous report."""
    failure: str = ""
    events: dict[str, int] = field(default_factory=dict)
    """Number of times that limits were hit, if the sandbox ended by itself."""


class Spawner:
    """A running `envd-spawn`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, name: str, ready: str) -> None:
        self.process = process
        self.walls = tuple(ready.split())
        """Those of memory, pids, cpu, landlock and seccomp that the spawner enforces."""
        self._control, self._name = control, name
        self._boxes: dict[int, Started] = {}
        self._archives: dict[int, asyncio.Future[None]] = {}
        self._backlog: deque[tuple[bytes, list[int]]] = deque()
        self._count = 0
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(control, self._hear)

    @classmethod
    async def start(cls, run_dir: Path, name: str, program: Path, keep: int = 0) -> Spawner:
        """Start a spawner and wait until it is ready. Raises BackendUnavailable with the spawner's message.

        name: name of its control groups. The spawner can reach templates below run_dir/templates. keep: number of ended
        sandboxes whose groups, user numbers and network namespaces it keeps for reuse.
        """
        arguments = [str(run_dir), name, str(program), str(keep)]
        try:
            process, control, hello = await start_helper("the native spawner", "envd.sandbox.spawner", *arguments)
        except BackendUnavailable:
            remove_groups(name)
            raise
        return cls(process, control, name, _words(_REPORT.unpack(hello)[3]))

    def create(
        self,
        stream: socket.socket,
        *,
        template: str,
        host_name: str,
        limits: Limits,
        read_only: bool = False,
        proxy: bool = False,
        archive: int | None = None,
        runtime: Runtime | None = None,
    ) -> Started:
        """Request a sandbox whose agent serves `stream`. The caller keeps ownership of both descriptors.

        The stream shows when the sandbox has started.

        proxy: the sandbox first sends the listener of its proxy's port over the stream. Raises SandboxStartError if the
        spawner has ended.
        """
        if self._gone.done():
            raise SandboxStartError(f"{self._gone.result()}: restart envd")
        self._count += 1
        number = self._count
        flags = (_READ_ONLY if read_only else 0) | (0 if archive is None else _RESTORE) | (_PROXY if proxy else 0)
        flags |= _ROOT if runtime and runtime.is_root else 0
        quota = max(1000, int(limits.cpu * _PERIOD_US))
        sizes = (limits.memory_mb * _MIB, limits.disk_mb * _MIB, limits.pids, quota, _OPEN_FILES)
        names = [each.encode() for each in (template, host_name, runtime.digest if runtime else "")]
        if any(len(each) > _MAX_NAME for each in names):
            raise SandboxStartError(f"a sandbox's template, host name and runtime have at most {_MAX_NAME} bytes")
        started = self._boxes[number] = Started(number, self._loop.create_future(), self._loop.create_future())
        fds = [stream.fileno(), *([] if archive is None else [archive])]
        self._send(_REQUEST.pack(_CREATE, number, *sizes, flags, *names), fds)
        return started

    def kill(self, box: Started, *, changed: bool = False) -> None:
        """Kill a sandbox; `box.ended` is done when nothing is left of it.

        changed: another process than the spawner has changed its groups.
        """
        if not box.ended.done():
            self._send(_plain(_KILL, box.number, _CHANGED if changed else 0))

    async def archive(self, box: Started, out: int) -> None:
        """Write the files that a sandbox changed to an open file, as a tar. Raises EnvdError."""
        if self._gone.done():
            raise EnvdError(f"the snapshot failed: {self._gone.result()}")
        if box.number in self._archives:
            raise EnvdError("a snapshot of this sandbox is being taken already")
        done = self._archives[box.number] = self._loop.create_future()
        self._send(_plain(_ARCHIVE, box.number), [out])
        await done

    async def died(self) -> str:
        """Wait until the spawner ends, and return the reason."""
        return await asyncio.shield(self._gone)

    async def stop(self) -> None:
        """End all sandboxes and the spawner, and wait until they have ended."""
        if not self._gone.done():
            self._send(_plain(_LEAVE, 0))
            try:
                async with asyncio.timeout(_STOP_S):
                    await asyncio.shield(self._gone)
            except TimeoutError:
                self._lose("it was stopped")
        await wait_for_helper(self.process)
        await asyncio.to_thread(remove_groups, self._name)

    def _send(self, data: bytes, fds: list[int] | None = None) -> None:
        """Send a request, or queue it with duplicates of its descriptors while the socket is full."""
        if self._gone.done():
            return
        if not self._backlog and self._sent(data, fds or []):
            return
        if not self._backlog:
            self._loop.add_writer(self._control, self._flush)
        self._backlog.append((data, [os.dup(fd) for fd in fds or []]))

    def _sent(self, data: bytes, fds: list[int]) -> bool:
        try:
            if fds:
                socket.send_fds(self._control, [data], fds)
            else:
                self._control.send(data)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the spawner has ended, which the reader notices
        return True

    def _flush(self) -> None:
        while self._backlog and self._sent(*self._backlog[0]):
            for fd in self._backlog.popleft()[1]:
                os.close(fd)
        if not self._backlog:
            self._loop.remove_writer(self._control)

    def _hear(self) -> None:
        try:
            for _ in range(64):
                data = self._control.recv(_REPORT.size)
                if len(data) != _REPORT.size:
                    self._lose("the native spawner has ended")
                    return
                self._note(*_REPORT.unpack(data))
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"the native spawner has gone ({error})")

    def _note(self, kind: int, number: int, value: int, text: bytes) -> None:
        box = self._boxes.get(number)
        if kind == _ARCHIVED:
            done = self._archives.pop(number, None)
            if done is not None and not done.done():
                # 1: a file changed while it was read
                (
                    done.set_result(None)
                    if value in (0, 1)
                    else done.set_exception(EnvdError(f"the snapshot failed: {_words(text)}"))
                )
        elif box is None:
            return
        elif kind == _STARTED:
            box.pid = value
            box.groups, _, used = _words(text).partition(" ")
            box.used_before_us = int(used)
            _settle(box.running)
        elif kind == _REFUSED:
            if box.on_refused is not None:
                box.on_refused(_words(text), value)
        elif kind == _SOCKETS:
            box.events["sockets"] = value
        elif kind == _FAILED:
            box.failure = _words(text)
        elif kind == _ENDED:
            words = _words(text).split()
            box.events |= {key: int(count) for key, count in zip(words[::2], words[1::2], strict=True) if count != "0"}
            box.pid = 0
            del self._boxes[number]
            _settle(box.running)
            _settle(box.ended)

    def _lose(self, reason: str) -> None:
        """Mark the spawner and all its sandboxes as ended: the kernel kills the sandboxes with the spawner."""
        if self._gone.done():
            return
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        for _, fds in self._backlog:
            for fd in fds:
                os.close(fd)
        self._backlog.clear()
        for box in self._boxes.values():
            box.failure = box.failure or reason
            box.pid = 0
            _settle(box.running)
            _settle(box.ended)
        for done in self._archives.values():
            if not done.done():
                done.set_exception(EnvdError(f"the snapshot failed: {reason}"))
        self._boxes.clear()
        self._archives.clear()
        self._gone.set_result(reason)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _plain(kind: int, number: int, flags: int = 0) -> bytes:
    return _REQUEST.pack(kind, number, 0, 0, 0, 0, 0, flags, b"", b"", b"")


def _words(text: bytes) -> str:
    return text.partition(b"\0")[0].decode(errors="replace")
