"""One QEMU process: start, run, stop, write its state, read its state.

QEMU runs as the sandboxes' user, in its own network namespace, under QEMU's own seccomp filter.
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
"""Kernel messages for a hit limit: mm/oom_kill.c (also for a group's limit), kernel/cgroup/pids.c (once per group)."""
_EVERYTHING = 1 << 40
"""Maximum bytes per second to write a state: effectively no limit."""


class Console:
    """Console output of a machine's kernel.

    Code in the machine can forge the output: the kept text is bounded, and hits count only against that machine.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self._tail = self._begun = b""

    @property
    def end(self) -> str:
        """End of the output, on one line."""
        words = self._tail[-_TAIL:].decode(errors="replace")
        return " ".join("".join(each if each.isprintable() else " " for each in words).split())

    def feed(self, said: bytes) -> None:
        """Add new output. An incomplete line counts when its end arrives."""
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
        """Start a QEMU with a stopped machine. groups: as for `VmmProcess`. Raises MachineError."""
        kvm = Path("/dev/kvm") if qemu.accelerator == "kvm" else None
        wanted = (parts.root, parts.template, parts.packages, parts.memory, parts.kernel, parts.ramdisk)
        given = [fd for fd in wanted if fd is not None]
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
        """Run or resume the machine."""
        await self.qmp.run("cont")
        self.guest.release()

    async def halt(self) -> None:
        """Pause the machine; pending requests to the agent wait for `go`."""
        self.guest.hold()
        await self.qmp.run("stop")

    async def write_state(self, fd: int, *, without_memory: bool = False) -> None:
        """Write the halted machine's state to an open file. without_memory: the memory is in its own file."""
        await self._capabilities({"x-ignore-shared": without_memory})
        await self.qmp.run("migrate-set-parameters", **{"max-bandwidth": _EVERYTHING})
        await self.qmp.run("getfd", fd=fd, fdname="state")
        try:
            await self.qmp.run("migrate", uri="fd:state")
            await self._migrated()
        except asyncio.CancelledError:
            # The machine must not resume while QEMU writes its state.
            with suppress(EnvdError):
                await self.qmp.run("migrate_cancel")
                await self._migrated()
            raise

    async def read_state(self, fd: int, *, without_memory: bool = False) -> None:
        """Load a state from an open file. without_memory: the memory is in its own file."""
        await self._capabilities({"x-ignore-shared": without_memory})
        await self.qmp.run("getfd", fd=fd, fdname="state")
        await self.qmp.run("migrate-incoming", uri="fd:state")
        await self._migrated()

    async def end(self) -> None:
        """Kill QEMU and wait until it has ended. Idempotent."""
        self.guest.close()
        self.process.kill()
        await self.process.wait()
        await self.qmp.close()

    def usage(self) -> tuple[int, float]:
        """(bytes of private memory, seconds of processor time) of QEMU."""
        return self.process.usage()

    async def fault(self, what: str) -> MachineError:
        """End the machine, and return an error with its last output."""
        await self._read_console()
        await self.end()
        said = (self.process.said or self.console.end)[-400:]
        return MachineError(f"{what}: {said or 'it printed nothing'}")

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
        """Number of limit hits that its kernel has reported: memory, pids."""
        await self._read_console()
        return dict(self.console.hits)

    async def _read_console(self) -> None:
        with suppress(EnvdError, TimeoutError):
            async with asyncio.timeout(2):
                raw = await self.qmp.run("ringbuf-read", device="console", size=CONSOLE_BYTES, format="base64")
                self.console.feed(base64.b64decode(raw))


def open_all(stack: ExitStack, *paths: Path) -> Sequence[int]:
    """Open files for reading; the stack closes them."""
    found = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        found.append(fd)
    return found
