"""The QEMU of this host, and its command line: a q35 machine with virtio devices only.

QEMU gets every file as an open descriptor and its two sockets as ends of socket pairs, and can open none of the
server's files by itself. The smaller microvm machine is not used: it has no clock by which Linux can calibrate an
emulated processor's, and one boot in two hangs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from envd.backends.vm.machine import Shape, kernel_arguments
from envd.errors import BackendUnavailable

_MACHINE = "q35,usb=off,smbus=off,sata=off,vmport=off,graphics=off,memory-backend=ram"
_FILTER = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_VERSION_S = 30.0
CONSOLE_BYTES = 65536
"""Number of bytes of a machine's console output that QEMU keeps."""


@dataclass(frozen=True)
class Qemu:
    """The QEMU of this host."""

    program: str
    version: str
    accelerator: str
    """kvm, or tcg (emulated processor)."""

    @property
    def named(self) -> str:
        """Name, version and accelerator of QEMU, on which a state depends."""
        return f"qemu {self.version} {self.accelerator}"


def find(accelerator: str) -> Qemu:
    """Find the installed QEMU. Raises BackendUnavailable with the fix."""
    program = shutil.which("qemu-system-x86_64")
    if program is None:
        raise BackendUnavailable("qemu-system-x86_64 is not installed: install Debian's package qemu-system-x86")
    said = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_S
    ).stdout
    found = re.search(r"version (\d+\.\d+\.\d+)", said)
    if found is None or int(found[1].split(".")[0]) < 6:
        raise BackendUnavailable(
            f"{program} is no QEMU of version 6 or newer ({said[:60].strip()!r}): install Debian's package"
            " qemu-system-x86"
        )
    return Qemu(program, found[1], accelerator)


@dataclass(frozen=True)
class Parts:
    """Open descriptors of one machine's files. The caller keeps ownership."""

    root: int
    template: int
    packages: int | None = None
    """Of a runtime; None: the root's own."""
    memory: int | None = None
    """A memory file; None: anonymous memory."""
    shared: bool = False
    """Whether the machine writes to the memory file; else the file is mapped copy-on-write."""
    kernel: int | None = None
    ramdisk: int | None = None
    """Kernel and ramdisk are for booting; a machine that starts from a state needs neither."""


def command_line(qemu: Qemu, shape: Shape, parts: Parts, agent: int, monitor: int) -> list[str]:
    """QEMU's command line. agent, monitor: descriptors of the two sockets."""
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
        *("-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=agent,fd={agent}", "-device", "virtio-serial-pci-non-transitional,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=envd,nr=1"),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
        *("-device", "virtio-rng-pci-non-transitional"),
    ]
    disks = {"root": parts.root, "template": parts.template, "packages": parts.packages}
    for number, (name, disk) in enumerate(disks.items(), start=1):
        if disk is None:
            continue
        line += [
            "-add-fd",
            f"set={number},fd={disk}",
            "-blockdev",
            (
                f"driver=raw,node-name={name},read-only=on,file.driver=file,"
                f"file.filename=/dev/fdset/{number},file.read-only=on,file.auto-read-only=off,file.locking=off"
            ),
            "-device",
            f"virtio-blk-pci-non-transitional,drive={name},serial={name}",
        ]
    if not booting:
        return [*line, "-incoming", "defer"]
    more = ("mitigations=off",) if software else ()  # an emulated processor lacks the real one's side channels
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
