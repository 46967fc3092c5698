"""Sandboxes as virtual machines under QEMU.

    boot once per template and shape -> stop -> memory and device state in sealed memory files: a base machine
    create     a QEMU that maps the base machine's memory copy-on-write -> INIT with a fresh seed, host name and clock
    snapshot   the whole state, memory included, in one file; can be restored where QEMU and guest image are the same

Without KVM, QEMU emulates the processor (TCG): the same machine, about ten times slower.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from envd.backends.base import BoxSpec, Features, Usage
from envd.backends.probing import probe
from envd.backends.qemu.command import Parts, Qemu, find
from envd.backends.qemu.machine import QemuMachine, open_all
from envd.backends.vm.backend import WARM, MachineBackend
from envd.backends.vm.base_machines import BaseMachine
from envd.backends.vm.box import MachineBox
from envd.backends.vm.machine import About, Shape, environment, read_about, write_about
from envd.backends.vm.media import Disks, Media
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, SandboxStartError

STATE, DISK = "state", "template.squashfs"
_BOOT_S, _RESTORE_S, _PROBE_S = 180.0, 180.0, 15.0
_QEMU_MB = 192
"""Memory in MiB that a QEMU uses in addition to its machine's."""
_THREADS = 64
_log = logging.getLogger("envd")


class QemuBox(MachineBox[QemuMachine]):
    """A running machine with an agent in it."""

    def __init__(self, machine: QemuMachine, about: About, disk: int, left: Callable[[QemuBox], None]) -> None:
        """disk: a descriptor of the template's disk, of which the box takes ownership.

        left: called when the box has ended.
        """
        super().__init__(machine, machine.guest, about, lambda: left(self))
        self._disk = disk

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write memory, processes and files below `into`; the machine is paused meanwhile."""
        async with self._turn, self._halted():
            fd = os.open(into / STATE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                await self._machine.write_state(fd)
            finally:
                os.close(fd)
            await asyncio.to_thread(shutil.copyfile, f"/proc/self/fd/{self._disk}", into / DISK)
            write_about(into, self._about)
        return ()

    async def usage(self) -> Usage:
        """Memory and processor time of its QEMU; limits hit, from the guest kernel's messages."""
        return replace(await super().usage(), events=await self._machine.limits_hit())

    def _let_go(self) -> None:
        os.close(self._disk)


class QemuBackend(MachineBackend[QemuBox]):
    """Runs sandboxes under QEMU."""

    name = "qemu"

    _vmm_mb, _vmm_pids = _QEMU_MB, _THREADS
    _copies = 2
    """Two: its own pages, and the base machine's, charged to the first reader (a snapshot reads all)."""

    def __init__(self, run_dir: Path, qemu: Qemu, media: Media) -> None:
        super().__init__(run_dir, media, starts=2)
        self._qemu = qemu

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        return self._features(self._qemu.named)

    async def create(self, spec: BoxSpec) -> QemuBox:
        """Start a machine from its base machine; boot that first if there is none."""
        shape = Shape.of(spec)
        disks = await self._media.disks(spec)
        booted = await self._bases.get((spec.template, shape), lambda: self._boot(shape, disks))
        with booted.opened() as (memory, state), ExitStack() as held:
            parts = replace(_parts(held, disks), memory=memory)
            return await self._go_on(spec, shape, parts, state)

    async def restore(self, snapshot: Path, spec: BoxSpec) -> QemuBox:
        """Start a machine from a snapshot."""
        vmm, image = self._qemu.named, self._media.digest
        about = read_about(snapshot, backend=self.name, vmm=vmm, image=image, spec=spec)
        Shape.of(spec)
        disks = (await self._media.disks(spec))._replace(template=snapshot / DISK)
        with ExitStack() as held:
            try:
                (state,) = open_all(held, snapshot / STATE)
                parts = _parts(held, disks)
            except OSError as error:
                raise SandboxStartError(
                    f"{snapshot.name} is an incomplete snapshot: {error.filename} can't be read"
                ) from error
            return await self._go_on(spec, about.shape, parts, state)

    async def _boot(self, shape: Shape, disks: Disks) -> BaseMachine:
        """Boot a machine, stop it and return it as a base machine. Raises SandboxStartError."""
        began = time.monotonic()
        booted = BaseMachine(shape.machine_mb << 20)
        memory, state = booted.raw
        try:
            with ExitStack() as held:
                media = self._media
                kernel, ramdisk = open_all(held, media.kernel, media.ramdisk)
                own = _parts(held, disks)
                parts = replace(own, memory=memory, shared=True, kernel=kernel, ramdisk=ramdisk)
                group = self._group()
                machine = await QemuMachine.start(
                    self._qemu, shape, parts, self._grouped(group, shape, os.cpu_count() or 1)
                )
                try:
                    await machine.go()
                    async with asyncio.timeout(_BOOT_S):
                        await machine.guest.init(host_name="template", env={})
                        process, _ = await machine.guest.start(["/bin/bash", "-c", WARM])
                        await machine.guest.wait(process, wait_s=30)
                    await machine.halt()
                    await machine.write_state(state, without_memory=True)
                except (SandboxGone, TimeoutError) as error:
                    raise SandboxStartError(str(await machine.fault("a guest did not boot"))) from error
                finally:
                    await machine.end()
                    self._groups.remove(group)
            booted.seal()
        except BaseException:
            booted.close()
            raise
        _log.info("booted a template's machine in %.1f s", time.monotonic() - began)
        return booted

    async def _go_on(self, spec: BoxSpec, shape: Shape, parts: Parts, state: int) -> QemuBox:
        """Start a new sandbox from the state of another machine. Raises SandboxStartError."""
        group, disk = self._group(), os.dup(parts.template)
        machine: QemuMachine | None = None
        try:
            async with self._starting, asyncio.timeout(_RESTORE_S):
                machine = await QemuMachine.start(
                    self._qemu, shape, parts, self._grouped(group, shape, spec.limits.cpu)
                )
                await machine.read_state(state, without_memory=parts.memory is not None)
                await machine.go()
                await machine.guest.init(host_name=spec.host_name, env=environment(spec), unix_ns=time.time_ns())
        except BaseException as error:
            os.close(disk)
            said = ""
            if machine is not None:
                said = str(await machine.fault("the machine does not go on"))
            self._groups.remove(group)
            if isinstance(error, (EnvdError, OSError, TimeoutError)):
                raise SandboxStartError(f"sandbox {spec.name} did not start under QEMU: {said or error}") from error
            raise
        about = self._about(self._qemu.named, spec.template, shape)
        box = QemuBox(machine, about, disk, lambda box: self._forget(box, group))
        self._boxes.add(box)
        return box


def _parts(held: ExitStack, disks: Disks) -> Parts:
    """A machine's disks, open."""
    root, template, *packages = open_all(held, *(each for each in disks if each is not None))
    return Parts(root, template, packages[0] if packages else None)


async def start(run_dir: Path, image: Path | None = None, accelerator: str | None = None) -> QemuBackend:
    """Start the backend and test it by booting a guest. Raises BackendUnavailable with the fix.

    accelerator: kvm or tcg; None: $TRIPLANE_ENVD_QEMU_ACCEL, else KVM if a guest boots under it, else TCG.
    """
    wanted = accelerator or os.environ.get("TRIPLANE_ENVD_QEMU_ACCEL", "auto")
    if wanted not in ("kvm", "tcg", "auto"):
        raise BackendUnavailable(f"TRIPLANE_ENVD_QEMU_ACCEL={wanted!r}: use kvm, tcg or auto")
    tries = [wanted] if wanted != "auto" else ["kvm", "tcg"] if os.access("/dev/kvm", os.R_OK | os.W_OK) else ["tcg"]
    qemus = [await asyncio.to_thread(find, each) for each in tries]
    for number, qemu in enumerate(qemus):
        directory = run_dir / f"qemu{number}"
        media = await asyncio.to_thread(Media, directory, image)
        backend = QemuBackend(run_dir, qemu, media)
        try:
            await probe(backend.create, directory, qemu.named, _BOOT_S if qemu is qemus[-1] else _PROBE_S)
            return backend
        except BackendUnavailable as error:
            await backend.stop()
            if qemu is qemus[-1]:
                raise
            # A /dev/kvm that opens but boots no guest is common inside virtual machines.
            _log.error("%s: emulating the processor instead, which is some ten times slower", error)
        except BaseException:
            await backend.stop()
            raise
    raise AssertionError("unreachable")
