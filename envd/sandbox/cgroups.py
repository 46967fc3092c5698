"""Memory, pid and cpu limits by control groups, v1 and v2; one group per sandbox, never reused.

Where no group is writable, rlimits replace the limits; the server reports which limits the kernel enforces.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from contracts.owned import abandoned
from envd.errors import EnvdError
from envd.sandbox.delegation import CONTROLLERS, enable, own_group

_MOUNT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_FREEZE_S = 5.0
_OPTIONAL = frozenset({"memory.swap.max", "memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"})
"""Files that are absent in kernels without swap accounting or with deprecated v1 accounting."""
_SOCKET_SHARE = 8
"""Divisor of a sandbox's memory limit: its socket buffers may hold this share in addition on v1, which counts them
separately, and only under a limit. v2 counts them with the rest (envd/native/spawn_groups.c).
"""
_SOCKET_SLACK = 256 * 1024
"""Bytes that the kernel charges at once, and refuses if the charge would exceed the limit."""
OWNED = "envd-"
"""Prefix of the names of run directories and of the groups named after them. Identifies what a killed server left."""


class Cgroups:
    """Creates and removes sandbox groups.

    Holds directory descriptors open, so that it works after the zygote changes its root.
    """

    def __init__(self, name: str, *, freezer: bool = False) -> None:
        """freezer: also keep a v2 hierarchy without controllers, whose groups still freeze, kill and count time."""
        self._name = name
        self._bases: dict[str, int] = {}  # controller -> directory descriptor of our own group
        self._paths: dict[str, Path] = {}
        self._unified = False
        self._freezer = freezer
        sweep_groups()
        for controller, parent in _own_groups().items():
            base = parent / name
            try:
                base.mkdir()
            except OSError:
                continue
            self._paths[controller] = base
            self._bases[controller] = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if "memory" in self._bases:
            # The kernel counts socket memory while any group limits it: without this limit, each sandbox would switch
            # the accounting on and off.
            _put(self._bases["memory"], "memory.kmem.tcp.limit_in_bytes", "-1", optional=True)
        if "unified" in self._bases:
            self._prepare_unified()
        self._parents = {
            key: os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for key, path in self._paths.items()
        }

    @property
    def enforced(self) -> tuple[str, ...]:
        """Those of memory, pids and cpu that the kernel limits."""
        found = CONTROLLERS if self._unified else tuple(self._bases)
        return tuple(sorted(set(found) - {"unified"}))

    @property
    def unified(self) -> bool:
        """Whether v2 has the controllers."""
        return self._unified

    @property
    def descriptors(self) -> dict[str, tuple[int, int]]:
        """Descriptors of each controller's own group and of its parent directory; `unified` is v2."""
        return {key: (fd, self._parents[key]) for key, fd in self._bases.items()}

    def entrances(self, group: str, *, memory: int, pids: int, cpu: float) -> list[int]:
        """Create a group with these limits (bytes, processes, cores) and return the descriptors to enter it by.

        A process of one thread enters the group by writing b"0" to each descriptor. Moving another process waits for a
        grace period of the kernel; on v1, a process that moves itself does not wait.
        """
        self._make(group, memory=memory, pids=pids, cpu=cpu)
        return [
            os.open(f"{group}/{_entrance(key)}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=base)
            for key, base in self._bases.items()
        ]

    def entrance_files(self, group: str, *, memory: int, pids: int, cpu: float) -> list[Path]:
        """Create a group as `entrances` does and return paths, for a program that starts before it enters."""
        self._make(group, memory=memory, pids=pids, cpu=cpu)
        return [path / group / _entrance(key) for key, path in self._paths.items()]

    def _make(self, group: str, *, memory: int, pids: int, cpu: float) -> None:
        quota = max(1000, int(cpu * _PERIOD_US))
        if self._unified:
            files = {
                "unified": {
                    "memory.max": str(memory),
                    "memory.swap.max": "0",
                    "pids.max": str(pids),
                    "cpu.max": f"{quota} {_PERIOD_US}",
                }
            }
        else:
            files = {
                "memory": {
                    "memory.limit_in_bytes": str(memory),
                    "memory.memsw.limit_in_bytes": str(memory),
                    "memory.kmem.tcp.limit_in_bytes": str(memory // _SOCKET_SHARE),
                },
                "pids": {"pids.max": str(pids)},
                "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota)},
            }
        for controller, base in self._bases.items():
            os.mkdir(group, dir_fd=base)
            for key, value in files.get(controller, {}).items():
                _put(base, f"{group}/{key}", value, optional=key in _OPTIONAL)

    def remove(self, group: str) -> bool:
        """Remove an empty group. Returns False while the kernel tears down its last process."""
        removed = True
        for base in self._bases.values():
            try:
                os.rmdir(group, dir_fd=base)
            except FileNotFoundError:
                continue
            except OSError:
                removed = False
        return removed

    def close(self) -> None:
        """Remove all groups of this instance, and its own."""
        for controller, base in self._bases.items():
            for entry in os.listdir(base):  # noqa: PTH208 - a descriptor: the path is gone
                self.remove(entry)
            try:
                os.rmdir(self._name, dir_fd=self._parents[controller])
            except OSError:
                continue

    def _prepare_unified(self) -> None:
        """Use v2 if it has the controllers; in a hybrid layout v1 has them."""
        own = self._paths["unified"]
        self._unified = enable(own.parent) and enable(own)
        if not self._unified and not self._freezer:
            os.close(self._bases.pop("unified"))
            self._paths.pop("unified").rmdir()


def _entrance(controller: str) -> str:
    return "cgroup.procs" if controller == "unified" else "tasks"


def box_groups(name: str, group: str) -> dict[str, Path]:
    """Paths of one sandbox's groups by controller, as seen from the server that started the owner of `name`."""
    return {key: path / name / group for key, path in _own_groups().items()}


def _own_groups() -> dict[str, Path]:
    """Writable directories of this process's own group by controller; `unified` is v2."""
    found: dict[str, Path] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    unified = own_group()
    if unified is not None:
        found["unified"] = unified
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in CONTROLLERS:
                found[controller] = _MOUNT / controller / path.lstrip("/")
    return {key: path for key, path in found.items() if os.access(path, os.W_OK)}


def abandoned_groups() -> list[Path]:
    """Paths of the groups of servers that were killed together with their zygotes."""
    return [base for parent in dict.fromkeys(_own_groups().values()) for base in abandoned(parent, OWNED)]


def remove_groups(name: str, patience_s: float = 2.0) -> None:
    """Remove the groups whose names begin with `name`, once their processes have ended.

    name: the name of a run directory, for all groups of its server, or of one zygote's or spawner's group.

    patience_s: seconds that the last processes in the groups may take to end.
    """
    deadline = time.monotonic() + patience_s
    for parent in dict.fromkeys(_own_groups().values()):
        for base in parent.glob(f"{name}*"):
            while not _removed(base) and time.monotonic() < deadline:
                time.sleep(0.02)


def sweep_groups() -> None:
    """Remove abandoned groups. A group whose last process is still ending stays for the next server."""
    for base in abandoned_groups():
        _removed(base)


def _removed(base: Path) -> bool:
    try:
        for group in (*(each for each in base.iterdir() if each.is_dir()), base):
            group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _put(base: int, name: str, value: str, *, optional: bool = False) -> None:
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=base)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


class Measured(NamedTuple):
    """Counters of one sandbox's groups; 0 where a group does not exist."""

    memory_bytes: int
    pids: int
    cpu_s: float
    events: dict[str, int]
    """Number of times a limit was hit: memory, pids, sockets (memory of their buffers)."""


def measure(where: Mapping[str, Path]) -> Measured:
    """Read the counters of the groups that `box_groups` returned."""
    memory, pids = where.get("memory", where.get("unified")), where.get("pids", where.get("unified"))
    cpu = where.get("unified")
    killed = _field(memory, "memory.oom_control", "oom_kill") or _field(memory, "memory.events", "oom_kill")
    events = {"memory": killed, "pids": _field(pids, "pids.events", "max"), "sockets": _sockets_full(memory)}
    return Measured(
        memory_bytes=_field(memory, "memory.usage_in_bytes") + _field(memory, "memory.kmem.tcp.usage_in_bytes")
        or _field(memory, "memory.current"),
        pids=_field(pids, "pids.current"),
        cpu_s=_field(cpu, "cpu.stat", "usage_usec") / 1e6,
        events={key: count for key, count in events.items() if count},
    )


def _sockets_full(memory: Path | None) -> int:
    """Number of times that socket buffers hit their limit; on v1, which does not count, 1 if they ever did."""
    limit = _field(memory, "memory.kmem.tcp.limit_in_bytes")
    most = _field(memory, "memory.kmem.tcp.max_usage_in_bytes")
    return int(most + _SOCKET_SLACK >= limit) if limit else _field(memory, "memory.events", "sock_throttled")


async def freeze(where: Mapping[str, Path], frozen: bool) -> None:
    """Freeze or thaw the processes of a sandbox (v2) and wait until the kernel reports it. Raises EnvdError."""
    group = where["unified"]
    try:
        (group / "cgroup.freeze").write_text("1" if frozen else "0")
        deadline = time.monotonic() + _FREEZE_S
        while _field(group, "cgroup.events", "frozen") != frozen:
            if time.monotonic() > deadline:
                raise EnvdError(
                    f"the sandbox could not be frozen within {_FREEZE_S:g} s: a process hangs in the kernel"
                )
            await asyncio.sleep(0.001)
    except OSError as error:
        raise EnvdError(f"control group {group.name} can't be frozen: {error.strerror}") from error


def _field(group: Path | None, name: str, key: str = "") -> int:
    """A number from a group's file: the whole content, or the word after `key`. 0 if it can't be read."""
    try:
        text = (group / name).read_text() if group is not None else "0"
        return int(dict(line.split() for line in text.splitlines())[key] if key else text)
    except (KeyError, OSError, ValueError):
        return 0
