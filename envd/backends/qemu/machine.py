"""One QEMU: the steps boot, stop, write out, read in.

It runs as the sandboxes' user, in a network namespace of its own, under QEMU's own seccomp filter.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from envd.backends.qemu.command import CONSOLE_BYTES, Parts, Qemu, command_line
from envd.backends.qemu.qmp import Qmp
from envd.backends.vm.machine import MachineError, Shape
from envd.backends.vm.process import VmmProcess, confined
from envd.errors import EnvdError, SandboxGone
from envd.guest.link import GuestLink

_GREETING_S = 30.0
_TAIL = 4096
_HITS = {"memory": b"Killed process ", "pids": b"fork rejected by pids controller"}
"""What Linux says of a limit: mm/oom_kill.c (also of a group's), kernel/cgroup/pids.c (once a group)."""
_EVERYTHING = 1 << 40
"""Bytes a second that a state may be written with: no limit."""


class Console:
    """What a machine's kernel says.

    Code in it may say anything: what is kept is bounded, and counts only against its own machine.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self._tail = self._begun = b""

    @property
    def end(self) -> str:
        """The end of it, on one line."""
        words = self._tail[-_TAIL:].decode(errors="replace")
        return " ".join("".join(each if each.isprintable() else " " for each in words).split())

    def feed(self, said: bytes) -> None:
        """What it said since the last time. A line that is not ended yet is counted with its end."""
        *lines, begun = (self._begun + said).split(b"\n")
        for line in lines:
            for limit, words in _HITS.items():
                self.hits[limit] += words in line
        self._begun, self._tail = begun[-_TAIL:], (self._tail + said)[-_TAIL:]


class QemuMachine:
    """A QEMU process with its monitor and the link to the agent in it."""

    def __init__(self, process: VmmProcess, qmp: Qmp, guest: GuestLink) -> None:
        self.process, self.qmp, self.guest = process, qmp, guest
        self.console = Console()
        self._mourning: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, qemu: Qemu, shape: Shape, parts: Parts, groups: Sequence[Path]) -> QemuMachine:
        """Start a QEMU whose machine stands still. groups: as `VmmProcess` takes them."""
        kvm = Path("/dev/kvm") if qemu.accelerator == "kvm" else None
        given = [fd for fd in (parts.root, parts.template, parts.memory, parts.kernel, parts.ramdisk) if fd is not None]
        with ExitStack() as theirs:
            agent, its_agent = socket.socketpair()
            monitor, its_monitor = socket.socketpair()
            theirs.enter_context(its_agent)
            theirs.enter_context(its_monitor)
            try:
                line = command_line(qemu, shape, parts, its_agent.fileno(), its_monitor.fileno())
                process = VmmProcess(
                    confined(line, kvm), [*given, its_agent.fileno(), its_monitor.fileno()], groups=groups
                )
            except BaseException:
                agent.close()
                monitor.close()
                raise
        guest = await GuestLink.over_socket(agent, escaped=True)
        guest.hold()
        machine = cls(process, Qmp(monitor), guest)
        machine.qmp.on_event = machine._on_event
        try:
            await machine.qmp.greet(_GREETING_S)
        except BaseException as error:
            await machine.end()
            if isinstance(error, (SandboxGone, TimeoutError, OSError)):
                raise MachineError(f"QEMU did not start: {process.said or error}") from error
            raise
        return machine

    async def go(self) -> None:
        """Let the machine run."""
        await self.qmp.run("cont")
        self.guest.release()

    async def halt(self) -> None:
        """Stop the machine where it stands; asks under way wait for `go`."""
        self.guest.hold()
        await self.qmp.run("stop")

    async def write_state(self, fd: int, *, without_memory: bool = False) -> None:
        """Write the halted machine's state to an open file. without_memory: its memory file holds that part."""
        await self._capabilities({"x-ignore-shared": without_memory})
        await self.qmp.run("migrate-set-parameters", **{"max-bandwidth": _EVERYTHING})
        await self.qmp.run("getfd", fd=fd, fdname="state")
        try:
            await self.qmp.run("migrate", uri="fd:state")
            await self._migrated()
        except asyncio.CancelledError:
            # the machine must not go on while its state is being written
            with suppress(EnvdError):
                await self.qmp.run("migrate_cancel")
                await self._migrated()
            raise

    async def read_state(self, fd: int, *, without_memory: bool = False) -> None:
        """Take a state over from an open file."""
        await self._capabilities({"x-ignore-shared": without_memory})
        await self.qmp.run("getfd", fd=fd, fdname="state")
        await self.qmp.run("migrate-incoming", uri="fd:state")
        await self._migrated()

    async def end(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        self.guest.close()
        self.process.kill()
        await self.process.wait()
        await self.qmp.close()

    def usage(self) -> tuple[int, float]:
        """(bytes of memory of its own, seconds of processor time)."""
        return self.process.usage()

    async def fault(self, what: str) -> MachineError:
        """An error that says what the machine said last; ends it."""
        await self._read_console()
        await self.end()
        said = (self.process.said or self.console.end)[-400:]
        return MachineError(f"{what}: {said or 'it said nothing'}")

    async def _capabilities(self, wanted: dict[str, bool]) -> None:
        states = [{"capability": name, "state": on} for name, on in wanted.items()]
        await self.qmp.run("migrate-set-capabilities", capabilities=states)

    async def _migrated(self) -> None:
        pause = 0.002
        while True:
            about: dict[str, Any] = await self.qmp.run("query-migrate")
            status = about.get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise MachineError(
                    f"QEMU could not move the machine's state ({about.get('error-desc', status)}): check the space on"
                    " the disk"
                )
            await asyncio.sleep(pause)
            pause = min(0.05, pause * 1.5)

    def _on_event(self, name: str) -> None:
        if name == "SHUTDOWN":  # a panic, or the agent's end
            self._mourning = asyncio.get_running_loop().create_task(self._mourn())

    async def _mourn(self) -> None:
        await self._read_console()
        self.process.kill()

    async def limits_hit(self) -> dict[str, int]:
        """How often its kernel has said that it held a limit: memory, pids."""
        await self._read_console()
        return dict(self.console.hits)

    async def _read_console(self) -> None:
        with suppress(EnvdError, TimeoutError):
            async with asyncio.timeout(2):
                raw = await self.qmp.run("ringbuf-read", device="console", size=CONSOLE_BYTES, format="base64")
                self.console.feed(base64.b64decode(raw))


def open_all(stack: ExitStack, *paths: Path) -> Sequence[int]:
    """Open files for reading, until the stack ends."""
    found = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        found.append(fd)
    return found
