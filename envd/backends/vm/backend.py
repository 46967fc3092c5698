"""What the backends of virtual machines share: families, control groups, boxes that live, and the end of them all."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

from envd.backends.base import Features, IsolationLevel
from envd.backends.vm.box import MachineBox
from envd.backends.vm.families import Families, family_budget_mb
from envd.backends.vm.machine import About, Shape
from envd.backends.vm.media import Media
from envd.sandbox.cgroups import Cgroups

WARM = "true; python3 -c pass; git --version; ls -la / >/dev/null"
"""What a family's machine runs before it is kept, so that its copies find these pages in memory."""
B = TypeVar("B", bound=MachineBox[Any])


class MachineBackend(Generic[B]):
    """Runs sandboxes as virtual machines. A subclass says how a machine boots and goes on."""

    name: str
    _vmm_mb: int
    """Host memory of a machine beside its guest's, in MiB."""
    _vmm_pids: int
    """Processes and threads of a machine on the host."""
    _copies = 1
    """How often the guest's memory may be charged to the machine."""

    def __init__(self, run_dir: Path, media: Media, starts: int) -> None:
        """starts: how many machines may start at once, for each processor."""
        self._media = media
        self._groups = Cgroups(f"{run_dir.name}-{self.name}")
        self._families: Families[Any] = Families(family_budget_mb())
        self._boxes: set[B] = set()
        self._placed = 0
        self._starting = asyncio.Semaphore(starts * (os.cpu_count() or 1))
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def forget_template(self, template: str) -> None:
        """See `KeepsTemplates`."""
        await self._families.forget(template)
        self._media.forget(template)

    async def died(self) -> str:
        """Waits without end: every machine is a process of its own."""
        return await self._failed

    async def stop(self) -> None:
        """Destroy everything."""
        self._failed.cancel()
        await self._families.close()
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        await asyncio.to_thread(self._media.remove)
        self._groups.close()

    def _features(self, helper: str) -> Features:
        # memory and disk by the machine's size, whatever the host's cgroups can do; processes by the guest's own kernel
        enforced = {"memory", "disk", "pids"} | ({"cpu"} & set(self._groups.enforced))
        can = frozenset({"pause", "snapshot", "fork", "migrate", "pty"})
        return Features(IsolationLevel.MACHINE, tuple(sorted(enforced)), True, can, helper)

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
