"""One QEMU: its command line, and the steps boot, stop, write out, read in.

QEMU gets every file as an open descriptor and its two sockets as ends of socket pairs. It runs as the sandboxes' user, in a network namespace of
its own, under QEMU's own seccomp filter, and can open nothing of the server's by itself. The machine is a q35 with nothing on it but virtio: the
smaller microvm has no clock that Linux can calibrate the processor's by where that is emulated, and one boot in two hangs.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envd.backends.vm_machine import MachineError, Shape, kernel_arguments
from envd.backends.vm_process import VmmProcess, confined
from envd.backends.vm_qmp import Qmp, QmpError
from envd.errors import BackendUnavailable, EnvdError, SandboxGone
from envd.guest.link import GuestLink

_MACHINE = "q35,usb=off,smbus=off,sata=off,vmport=off,graphics=off,memory-backend=ram"
_FILTER = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_GREETING_S = 30.0
_CONSOLE, _TAIL = 65536, 4096
_HITS = {"memory": b"Killed process ", "pids": b"fork rejected by pids controller"}
"""What Linux says of a limit: mm/oom_kill.c (also of a group's), kernel/cgroup/pids.c (once a group)."""
_EVERYTHING = 1 << 40
"""Bytes a second that a state may be written with: no limit."""


@dataclass(frozen=True)
class Qemu:
    """The QEMU of this host."""

    program: str
    version: str
    accelerator: str
    """kvm, or tcg: the processor in software."""

    @property
    def named(self) -> str:
        """What a state depends on."""
        return f"qemu {self.version} {self.accelerator}"


def find(accelerator: str) -> Qemu:
    """The installed QEMU. Raises BackendUnavailable with the fix."""
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        raise BackendUnavailable("qemu-system-x86_64 is not installed: install Debian's package qemu-system-x86")
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=_GREETING_S
    ).stdout
    found = re.search(r"version (\d+\.\d+\.\d+)", said)
    if found is None or int(found[1].split(".")[0]) < 6:
        raise BackendUnavailable(
            f"{program} is no QEMU of version 6 or newer ({said[:60].strip()!r}): install Debian's package qemu-system-x86"
        )
    return Qemu(program, found[1], accelerator)


@dataclass(frozen=True)
class Parts:
    """What one machine is put together from: open descriptors, which stay the caller's."""

    root: int
    template: int
    memory: int | None = None
    """A memory file; None: anonymous memory."""
    shared: bool = False
    """Whether what the machine writes goes to the memory file; else each machine has its own copy of what it changes."""
    kernel: int | None = None
    ramdisk: int | None = None
    """Both for booting; a machine that goes on from a state needs none."""


def command_line(qemu: Qemu, shape: Shape, parts: Parts, agent: int, monitor: int) -> list[str]:
    """QEMU's arguments."""
    booting = parts.kernel is not None
    size = f"size={shape.machine_mb}M"
    if parts.memory is None:
        memory = f"memory-backend-ram,id=ram,{size}"
    else:
        share = "on" if parts.shared else "off"
        memory = f"memory-backend-file,id=ram,{size},mem-path=/proc/self/fd/{parts.memory},share={share},prealloc=off"
    software = qemu.accelerator == "tcg"
    line = [
        *(
            qemu.program,
            "-name",
            "sandbox",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-no-shutdown",
            "-S",
        ),
        *(
            "-machine",
            _MACHINE,
            "-cpu",
            "max" if software else "host",
            "-smp",
            str(shape.vcpus),
            "-m",
            f"{shape.machine_mb}M",
        ),
        *(
            "-accel",
            "tcg,thread=multi,tb-size=64" if software else qemu.accelerator,
            "-object",
            memory,
            "-sandbox",
            _FILTER,
        ),
        *("-chardev", f"ringbuf,id=console,size={_CONSOLE}", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=agent,fd={agent}", "-device", "virtio-serial-pci-non-transitional,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=envd,nr=1"),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
        *("-device", "virtio-rng-pci-non-transitional"),
    ]
    for number, (name, disk) in enumerate((("root", parts.root), ("template", parts.template)), start=1):
        line += ["-add-fd", f"set={number},fd={disk}", "-blockdev", f"driver=raw,node-name={name},read-only=on,file.driver=file,"
                 f"file.filename=/dev/fdset/{number},file.read-only=on,file.auto-read-only=off,file.locking=off",
                 "-device", f"virtio-blk-pci-non-transitional,drive={name},serial={name}"]  # fmt: skip
    if not booting:
        return [*line, "-incoming", "defer"]
    more = ("mitigations=off",) if software else ()  # an emulated processor has none of the real one's leaks
    arguments = kernel_arguments(shape, "serial", *more)
    return [
        *line,
        "-kernel",
        f"/proc/self/fd/{parts.kernel}",
        "-initrd",
        f"/proc/self/fd/{parts.ramdisk}",
        "-append",
        arguments,
    ]


class Console:
    """What a machine's kernel says. Code in it may say anything: what is kept is bounded, and counts only against its own machine."""

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
    async def start(cls, qemu: Qemu, shape: Shape, parts: Parts, place: Callable[[int], None]) -> QemuMachine:
        """Start a QEMU whose machine stands still. place: is given its pid, to limit it."""
        kvm = Path("/dev/kvm") if qemu.accelerator == "kvm" else None
        given = [fd for fd in (parts.root, parts.template, parts.memory, parts.kernel, parts.ramdisk) if fd is not None]
        with ExitStack() as theirs:
            agent, its_agent = socket.socketpair()
            monitor, its_monitor = socket.socketpair()
            theirs.enter_context(its_agent)
            theirs.enter_context(its_monitor)
            try:
                line = command_line(qemu, shape, parts, its_agent.fileno(), its_monitor.fileno())
                process = VmmProcess(confined(line, kvm), [*given, its_agent.fileno(), its_monitor.fileno()])
            except BaseException:
                agent.close()
                monitor.close()
                raise
        guest = await GuestLink.over_socket(agent, escaped=True)
        guest.hold()
        machine = cls(process, Qmp(monitor), guest)
        machine.qmp.on_event = machine._on_event
        try:
            place(process.pid)
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
                    f"QEMU could not move the machine's state ({about.get('error-desc', status)}): check the space on the disk"
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
                raw = await self.qmp.run("ringbuf-read", device="console", size=_CONSOLE, format="base64")
                self.console.feed(base64.b64decode(raw))


def open_all(stack: ExitStack, *paths: Path) -> Sequence[int]:
    """Open files for reading, until the stack ends."""
    found = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        found.append(fd)
    return found


__all__ = ["Parts", "Qemu", "QemuMachine", "QmpError", "command_line", "find", "open_all"]
