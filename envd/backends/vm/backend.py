"""Base class of the backends with virtual machines: base machines, control groups, live boxes, and shutdown."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

from envd.backends.base import Features, IsolationLevel
from envd.backends.vm.base_machines import BaseMachines, base_machine_budget_mb
from envd.backends.vm.box import MachineBox
from envd.backends.vm.machine import About, Shape
from envd.backends.vm.media import Media
from envd.sandbox.cgroups import Cgroups

WARM = "true; python3 -c pass; git --version; ls -la / >/dev/null"
"""Command that a base machine runs before it is saved, so that its copies have these pages in memory."""
B = TypeVar("B", bound=MachineBox[Any])


class MachineBackend(Generic[B]):
    """Runs sandboxes as virtual machines. Subclasses implement boot, start and restore."""

    name: str
    _vmm_mb: int
    """Host memory of a machine in addition to its guest's, in MiB."""
    _vmm_pids: int
    """Maximum number of processes and threads of a machine on the host."""
    _copies = 1
    """Number of times that the guest's memory may be charged to the machine."""

    def __init__(self, run_dir: Path, media: Media, starts: int) -> None:
        """starts: number of machines per processor that may start concurrently."""
        self._media = media
        self._groups = Cgroups(f"{run_dir.name}-{self.name}")
        self._bases: BaseMachines[Any] = BaseMachines(base_machine_budget_mb())
        self._boxes: set[B] = set()
        self._placed = 0
        self._starting = asyncio.Semaphore(starts * (os.cpu_count() or 1))
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def forget(self, digest: str) -> None:
        """See `Forgets`."""
        await self._bases.forget(digest)
        self._media.forget(digest)

    async def died(self) -> str:
        """Wait until `stop` cancels: machines are separate processes, and nothing else can fail."""
        return await self._failed

    async def stop(self) -> None:
        """Destroy all machines and remove media and control groups."""
        self._failed.cancel()
        await self._bases.close()
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        await asyncio.to_thread(self._media.remove)
        self._groups.close()

    def _features(self, helper: str) -> Features:
        # The machine's size limits memory and disk, without cgroups of the host; the guest's kernel limits processes.
        enforced = {"memory", "disk", "pids"} | ({"cpu"} & set(self._groups.enforced))
        can = {"pause", "snapshot", "fork", "migrate", "pty", "root"}
        can |= {"runtime"} if self._media.runs_our_packages else set()
        return Features(IsolationLevel.MACHINE, tuple(sorted(enforced)), True, frozenset(can), helper)

    def _about(self, vmm: str, template: str, shape: Shape) -> About:
        return About(self.name, vmm, self._media.digest, template, shape)

    def _group(self) -> str:
        self._placed += 1
        return f"m{self._placed}"

    def _grouped(self, group: str, shape: Shape, cpu: float) -> list[Path]:
        memory = (self._copies * shape.machine_mb + self._vmm_mb) << 20
        return self._groups.entrance_files(group, memory=memory, pids=self._vmm_pids, cpu=cpu)

    def _forget(self, box: B, group: str) -> None:
        self._boxes.discard(box)
        self._groups.remove(group)
