"""Sandboxes as microVMs under Firecracker.

    boot once a template and shape -> full snapshot: a base machine
    create     a Firecracker that maps its memory copy-on-write -> INIT with a fresh seed, host name and clock
    snapshot   a diff over what it was loaded from; merged, once the machine runs again, into one that stands alone

Written against Firecracker's published API and tested against a server that speaks it
(tests/envd/firecracker_server.py); never run on a real one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from envd.backends.base import BoxSpec, Features, IsolationLevel
from envd.backends.firecracker.machine import (
    KERNEL,
    MEMORY,
    RAMDISK,
    ROOT,
    STATE,
    TEMPLATE,
    Firecracker,
    FirecrackerMachine,
    find,
)
from envd.backends.probing import probe
from envd.backends.vm.base_machines import BaseMachines, base_machine_budget_mb
from envd.backends.vm.box import MachineBox
from envd.backends.vm.machine import About, Shape, environment, read_about, write_about
from envd.backends.vm.media import Media
from envd.backends.vm.sparse import open_written, write_over
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.sandbox.cgroups import Cgroups

_BOOT_S, _LOAD_S = 60.0, 30.0
_VMM_MB = 32
"""Memory of a Firecracker beside its machine's."""
_PROCESSES = 64
_STATE_BYTES = 64 << 20
_WARM = "true; python3 -c pass; git --version; ls -la / >/dev/null"


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
        """base: descriptors of the memory it was loaded from and of its template's disk; the box owns them from now
        on.
        """
        super().__init__(machine, guest, about, lambda: left(self))
        self._memory, self._disk = base

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write memory, processes and files below `into`.

        The machine stands still only while its changed pages are written.
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
        """Make a snapshot that stands alone of the diff. The next diff is over this one, which is kept open for it."""
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
    """The snapshot of a base machine, which others start from, in a directory of the server's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def close(self) -> None:
        """Remove it; jails that link to it keep what they link to."""
        shutil.rmtree(self.directory, ignore_errors=True)


class FirecrackerBackend:
    """Runs sandboxes under Firecracker."""

    name = "firecracker"

    def __init__(self, run_dir: Path, firecracker: Firecracker, media: Media) -> None:
        self._firecracker, self._media = firecracker, media
        self._directory = run_dir / "fc"
        self._groups = Cgroups(f"{run_dir.name}-{self.name}")
        self._bases: BaseMachines[_BaseMachine] = BaseMachines(base_machine_budget_mb())
        self._boxes: set[FirecrackerBox] = set()
        self._numbers = 0
        self._starting = asyncio.Semaphore(4 * (os.cpu_count() or 1))
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def features(self) -> Features:
        """What it can do here."""
        enforced = {"memory", "disk", "pids"} | ({"cpu"} & set(self._groups.enforced))
        can = frozenset({"pause", "snapshot", "fork", "migrate", "pty"})
        jailed = "" if self._firecracker.jailer else " without jailer"
        return Features(
            IsolationLevel.MACHINE, tuple(sorted(enforced)), True, can, f"{self._firecracker.named}{jailed}"
        )

    async def create(self, spec: BoxSpec) -> FirecrackerBox:
        """Start a machine from its base machine's snapshot, which is made first where there is none yet."""
        shape = Shape.of(spec)
        disk = await self._media.template_disk(spec.template, spec.template_dir)
        booted = await self._bases.get((spec.template, shape), lambda: self._boot(shape, disk))
        return await self._go_on(spec, shape, booted.directory / STATE, booted.directory / MEMORY, disk)

    async def restore(self, snapshot: Path, spec: BoxSpec) -> FirecrackerBox:
        """Start a machine from a snapshot."""
        Shape.of(spec)
        about = read_about(
            snapshot, backend=self.name, vmm=self._firecracker.named, image=self._media.digest, spec=spec
        )
        return await self._go_on(spec, about.shape, snapshot / STATE, snapshot / MEMORY, snapshot / TEMPLATE)

    async def forget_template(self, template: str) -> None:
        """See `KeepsTemplates`."""
        await self._bases.forget(template)
        self._media.forget(template)

    async def died(self) -> str:
        """Waits without end: every machine is a process of its own."""
        return await self._failed

    async def stop(self) -> None:
        """Destroy everything."""
        self._failed.cancel()
        await self._bases.close()
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        await asyncio.to_thread(shutil.rmtree, self._directory, True)
        await asyncio.to_thread(self._media.remove)
        self._groups.close()

    async def _boot(self, shape: Shape, disk: Path) -> _BaseMachine:
        """Boot a machine and keep its snapshot."""
        machine, group = self._machine(shape)
        booted = _BaseMachine(self._directory / "bases" / group)
        booted.directory.mkdir(parents=True)
        media = self._media
        try:
            await asyncio.to_thread(
                machine.bring, {KERNEL: media.kernel, RAMDISK: media.ramdisk, ROOT: media.root, TEMPLATE: disk}
            )
            await machine.start(self._grouped(group, shape, os.cpu_count() or 1), mute=False)
            await machine.boot()
            guest = await machine.reach_agent(_BOOT_S)
            await guest.init(host_name="template", env={})
            process, _ = await guest.start(["/bin/bash", "-c", _WARM])
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

    async def _go_on(self, spec: BoxSpec, shape: Shape, state: Path, memory: Path, disk: Path) -> FirecrackerBox:
        """Start a machine in the state of another, as a sandbox of its own."""
        machine, group = self._machine(shape)
        with ExitStack() as held:
            try:
                async with self._starting:
                    await asyncio.to_thread(
                        machine.bring, {STATE: state, MEMORY: memory, ROOT: self._media.root, TEMPLATE: disk}
                    )
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
        about = About(self.name, self._firecracker.named, self._media.digest, spec.template, shape)
        box = FirecrackerBox(machine, guest, about, (base[0], base[1]), lambda box: self._forget(box, group))
        self._boxes.add(box)
        return box

    def _machine(self, shape: Shape) -> tuple[FirecrackerMachine, str]:
        self._numbers += 1
        return FirecrackerMachine(self._firecracker, self._directory, self._numbers, shape), f"m{self._numbers}"

    def _grouped(self, group: str, shape: Shape, cpu: float) -> list[Path]:
        memory = (shape.machine_mb + _VMM_MB) << 20
        return self._groups.entrance_files(group, memory=memory, pids=_PROCESSES, cpu=cpu)

    def _forget(self, box: FirecrackerBox, group: str) -> None:
        self._boxes.discard(box)
        self._groups.remove(group)


async def start(run_dir: Path, image: Path | None = None) -> FirecrackerBackend:
    """Start the backend. Raises BackendUnavailable, with the fix, where no machine really starts."""
    firecracker = await find()
    directory = run_dir / "fc-media"
    # jails link to what is on their own file system
    media = await asyncio.to_thread(lambda: Media(directory, image, own_copies=True))
    backend = FirecrackerBackend(run_dir, firecracker, media)
    try:
        await probe(backend.create, directory, firecracker.named, _BOOT_S)
    except BaseException:
        await backend.stop()
        raise
    return backend
