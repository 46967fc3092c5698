"""Sandboxes as microVMs under Firecracker.

    boot once per template and shape -> full snapshot: a base machine
    create     a Firecracker that maps its memory copy-on-write -> INIT with a fresh seed, host name and clock
    snapshot   a diff against the loaded snapshot; merged into a complete snapshot after the machine resumes

Written against Firecracker's published API and tested against a server that implements it
(tests/envd/firecracker_server.py); never run on a real Firecracker.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from envd.backends.base import BoxSpec, Features
from envd.backends.firecracker.machine import (
    KERNEL,
    MEMORY,
    PACKAGES,
    RAMDISK,
    ROOT,
    STATE,
    TEMPLATE,
    Firecracker,
    FirecrackerMachine,
    find,
)
from envd.backends.probing import probe
from envd.backends.vm.backend import WARM, MachineBackend
from envd.backends.vm.box import MachineBox
from envd.backends.vm.machine import About, Shape, environment, read_about, write_about
from envd.backends.vm.media import Disks, Media
from envd.backends.vm.sparse import open_written, write_over
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink

_BOOT_S, _LOAD_S = 60.0, 30.0
_VMM_MB = 32
"""Memory in MiB that a Firecracker uses in addition to its machine's."""
_PROCESSES = 64
_STATE_BYTES = 64 << 20


class FirecrackerBox(MachineBox[FirecrackerMachine]):
    """A running machine with an agent in it."""

    def __init__(
        self,
        machine: FirecrackerMachine,
        guest: GuestLink,
        about: About,
        base: tuple[int, int],
        left: Callable[[FirecrackerBox], None],
    ) -> None:
        """base: descriptors of the loaded memory file and of the template's disk. The box takes ownership of them."""
        super().__init__(machine, guest, about, lambda: left(self))
        self._memory, self._disk = base

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write memory, processes and files below `into`.

        The machine is paused only while its changed pages are written.
        """
        async with self._turn:
            async with self._halted():
                await self._machine.write("Diff", "diff.state", "diff.memory")
            await asyncio.to_thread(self._merge, into)
            write_about(into, self._about)
        return ()

    def _let_go(self) -> None:
        os.close(self._memory)
        os.close(self._disk)

    def _merge(self, into: Path) -> None:
        """Merge the diff into a complete snapshot. Keeps its memory file open as the base of the next diff."""
        jail, whole = self._machine.root, self._machine.shape.machine_mb << 20
        state = open_written(jail, "diff.state", _STATE_BYTES)
        try:
            write_over(into / STATE, state)
        finally:
            os.close(state)
        diff = open_written(jail, "diff.memory", whole)
        try:
            write_over(into / MEMORY, self._memory, diff)
        finally:
            os.close(diff)
        write_over(into / TEMPLATE, self._disk)
        merged = os.open(into / MEMORY, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._memory)
        self._memory = merged
        for name in ("diff.state", "diff.memory"):
            (jail / name).unlink(missing_ok=True)


class _BaseMachine:
    """Snapshot of a base machine, from which others start, in a directory of the server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._users = 0
        self._closed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the files for the block, also if the base machine is closed meanwhile."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._closed:
                self.close()

    def close(self) -> None:
        """Remove the snapshot once nobody holds it; jails keep the files that they link to."""
        self._closed = True
        if not self._users:
            shutil.rmtree(self.directory, ignore_errors=True)


class FirecrackerBackend(MachineBackend[FirecrackerBox]):
    """Runs sandboxes under Firecracker."""

    name = "firecracker"

    _vmm_mb, _vmm_pids = _VMM_MB, _PROCESSES

    def __init__(self, run_dir: Path, firecracker: Firecracker, media: Media) -> None:
        super().__init__(run_dir, media, starts=4)
        self._firecracker = firecracker
        self._directory = run_dir / "fc"

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        return self._features(self._firecracker.named + ("" if self._firecracker.jailer else " without jailer"))

    async def create(self, spec: BoxSpec) -> FirecrackerBox:
        """Start a machine from its base machine's snapshot; create that first if there is none."""
        shape = Shape.of(spec)
        disks = await self._media.disks(spec)
        booted = await self._bases.get((spec.template, shape), lambda: self._boot(shape, disks))
        with booted.held():
            return await self._go_on(spec, shape, booted.directory / STATE, booted.directory / MEMORY, disks)

    async def restore(self, snapshot: Path, spec: BoxSpec) -> FirecrackerBox:
        """Start a machine from a snapshot."""
        Shape.of(spec)
        about = read_about(
            snapshot, backend=self.name, vmm=self._firecracker.named, image=self._media.digest, spec=spec
        )
        disks = (await self._media.disks(spec))._replace(template=snapshot / TEMPLATE)
        return await self._go_on(spec, about.shape, snapshot / STATE, snapshot / MEMORY, disks)

    async def stop(self) -> None:
        """Destroy everything."""
        await super().stop()
        await asyncio.to_thread(shutil.rmtree, self._directory, True)

    async def _boot(self, shape: Shape, disks: Disks) -> _BaseMachine:
        """Boot a machine and return its snapshot. Raises SandboxStartError."""
        machine, group = self._machine(shape)
        booted = _BaseMachine(self._directory / "bases" / group)
        booted.directory.mkdir(parents=True)
        media = self._media
        try:
            await asyncio.to_thread(machine.bring, {KERNEL: media.kernel, RAMDISK: media.ramdisk, **_named(disks)})
            await machine.start(self._grouped(group, shape, os.cpu_count() or 1), mute=False)
            await machine.boot()
            guest = await machine.reach_agent(_BOOT_S)
            await guest.init(host_name="template", env={})
            process, _ = await guest.start(["/bin/bash", "-c", WARM])
            await guest.wait(process, wait_s=30)
            await machine.halt()
            await machine.write("Full", "full.state", "full.memory")
            for name, limit in ((STATE, _STATE_BYTES), (MEMORY, shape.machine_mb << 20)):
                written = open_written(machine.root, f"full.{name}", limit)
                try:
                    await asyncio.to_thread(write_over, booted.directory / name, written)
                finally:
                    os.close(written)
        except BaseException as error:
            booted.close()
            if isinstance(error, (SandboxGone, OSError, TimeoutError)):
                raise SandboxStartError(f"a guest did not boot under Firecracker: {error} {machine.said}") from error
            raise
        finally:
            await machine.end()
            self._groups.remove(group)
        return booted

    async def _go_on(self, spec: BoxSpec, shape: Shape, state: Path, memory: Path, disks: Disks) -> FirecrackerBox:
        """Start a new sandbox from the state of another machine. Raises SandboxStartError."""
        machine, group = self._machine(shape)
        with ExitStack() as held:
            try:
                async with self._starting:
                    await asyncio.to_thread(machine.bring, {STATE: state, MEMORY: memory, **_named(disks)})
                    base = [
                        os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        for path in (machine.root / MEMORY, machine.root / TEMPLATE)
                    ]
                    for fd in base:
                        held.callback(os.close, fd)
                    await machine.start(self._grouped(group, shape, spec.limits.cpu), mute=True)
                    await machine.load()
                    guest = await machine.reach_agent(_LOAD_S)
                    await guest.init(host_name=spec.host_name, env=environment(spec), unix_ns=time.time_ns())
            except BaseException as error:
                await machine.end()
                self._groups.remove(group)
                if isinstance(error, (EnvdError, OSError, TimeoutError)):
                    raise SandboxStartError(f"sandbox {spec.name} did not start under Firecracker: {error}") from error
                raise
            held.pop_all()  # the box owns them now
        about = self._about(self._firecracker.named, spec.template, shape)
        box = FirecrackerBox(machine, guest, about, (base[0], base[1]), lambda box: self._forget(box, group))
        self._boxes.add(box)
        return box

    def _machine(self, shape: Shape) -> tuple[FirecrackerMachine, str]:
        group = self._group()
        return FirecrackerMachine(self._firecracker, self._directory, self._placed, shape), group


def _named(disks: Disks) -> dict[str, Path]:
    """A machine's disks by their names in its jail."""
    names = zip((ROOT, TEMPLATE, PACKAGES), disks, strict=True)
    return {name: path for name, path in names if path is not None}


async def start(run_dir: Path, image: Path | None = None) -> FirecrackerBackend:
    """Start the backend and test it by starting a machine. Raises BackendUnavailable with the fix."""
    firecracker = await find()
    directory = run_dir / "fc-media"
    # own copies, since jails can only link to files on their own file system
    media = await asyncio.to_thread(lambda: Media(directory, image, own_copies=True))
    backend = FirecrackerBackend(run_dir, firecracker, media)
    try:
        await probe(backend.create, directory, firecracker.named, _BOOT_S)
    except BaseException:
        await backend.stop()
        raise
    return backend
