"""Protocol between the server and the backends that run sandboxes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from envd.guest.link import GuestLink
from envd.types import Limits


class IsolationLevel(IntEnum):
    """Strength of a sandbox's isolation; sandbox rules set the minimum."""

    NONE = 0
    """Ordinary processes of the host."""
    PROCESS = 1
    """Namespaces, seccomp, Landlock and cgroups over the host's kernel."""
    KERNEL = 2
    """A separate kernel in user space (gVisor)."""
    MACHINE = 3
    """A virtual machine."""


@dataclass(frozen=True)
class NetworkRule:
    """One destination that a sandbox may connect to."""

    host: str
    """A name, an address, or a network such as 10.0.0.0/8."""
    ports: tuple[int, ...] = ()
    """Empty: all ports."""


@dataclass(frozen=True)
class Runtime:
    """What a sandbox sees instead of this host's packages, or of this host's whole system (envd/server/runtimes.py)."""

    digest: str
    directory: Path
    """Its files on this host, read-only."""
    is_root: bool = False
    """Whether it is a whole root file system."""
    is_ours: bool = False
    """Whether its pytest is the server's, so that tests can run in a process that has imported it."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of a root."""

    def environment(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Variables of a sandbox: a request's own before the root's. Idempotent."""
        own, places = dict(self.env), wanted.get("PYTHONPATH", "")
        env = {**own, **wanted}
        if places and own.get("PYTHONPATH") and not f":{places}".endswith(f":{own['PYTHONPATH']}"):
            env["PYTHONPATH"] = f"{places}:{own['PYTHONPATH']}"
        return env


@dataclass(frozen=True)
class BoxSpec:
    """Properties of a sandbox to start."""

    name: str
    """Unique on this server, a safe file name; never an id that clients see."""
    template: str
    """Digest of the template."""
    template_dir: Path
    """Directory of the template's files on this host, owned by `sandbox_owner()`; read-only."""
    limits: Limits
    runtime: Runtime | None = None
    """None: this host's system and packages."""
    env: Mapping[str, str] = field(default_factory=dict)
    host_name: str = "sandbox"
    network: tuple[NetworkRule, ...] = ()
    """Empty: a private loopback only."""
    read_only: bool = False
    """Whether the workspace is read-only (`filesystem.read_only` of the rules)."""
    supervised: bool = False
    """Whether the sandbox is for a verification: if the backend supports this, its first user may become others, so
    that verifier and tests run as different users.
    """

    @property
    def runtime_digest(self) -> str:
        """Digest of the runtime, empty without one."""
        return self.runtime.digest if self.runtime else ""


@dataclass(frozen=True)
class Usage:
    """Current resource usage of a sandbox. 0 if the backend does not know."""

    memory_bytes: int = 0
    pids: int = 0
    cpu_s: float = 0.0
    disk_bytes: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of times a limit was hit: memory, pids."""
    disk_full: bool = False
    """Whether the disk is full, in bytes or in files. False if the backend does not know."""


@dataclass(frozen=True)
class Features:
    """Features of a backend. Services refuse missing features with UNIMPLEMENTED and the backend's name."""

    isolation: IsolationLevel
    limits_enforced: tuple[str, ...]
    """Subset of memory, pids, cpu, disk."""
    keeps_processes: bool
    """Whether snapshots hold memory and processes; else they hold files only."""
    can: frozenset[str]
    """Subset of pause, snapshot, fork, migrate, pty, network, runtime (packages), root. Hibernation needs snapshot."""
    helper: str
    """Program that starts sandboxes: `native`, or a name and version."""

    @property
    def offered(self) -> frozenset[str]:
        """Features that clients see: `can`, and hibernate if the backend can take snapshots."""
        return self.can | ({"hibernate"} if "snapshot" in self.can else set())


class Box(Protocol):
    """One running sandbox. Methods raise SandboxGone if it has ended, and EnvdError with the reason otherwise."""

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        ...

    async def pause(self) -> None:
        """Pause all processes of the sandbox."""
        ...

    async def resume(self) -> None:
        """Resume all processes of the sandbox."""
        ...

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write the sandbox's state below `into` (an empty directory); the sandbox continues to run.

        Returns the kinds of state that are not kept, e.g. ("processes",).
        """
        ...

    async def usage(self) -> Usage:
        """Current resource usage."""
        ...

    async def destroy(self) -> None:
        """End the sandbox and remove its processes, mounts, cgroups and directories. Idempotent."""
        ...


@runtime_checkable
class TellsRefusals(Protocol):
    """A box that reports refused system calls of its code."""

    def tell_refusals(self, tell: Callable[[str, int], None]) -> None:
        """Register `tell`, which is called with the name of a refused system call and the number of new refusals.

        The calls come a few times a second at most.
        """
        ...


@runtime_checkable
class Forgets(Protocol):
    """A backend that keeps data of templates and runtimes: disks, or sandboxes that are started in advance."""

    async def forget(self, digest: str) -> None:
        """Remove all data of a template or a runtime that is being removed and that no sandbox uses."""
        ...


@runtime_checkable
class OffersProxy(Protocol):
    """A box with a port to the server's proxy, if its rules allow destinations."""

    @property
    def proxy_listener(self) -> socket.socket | None:
        """Socket on which the server accepts connections until the box is destroyed; None without destinations."""
        ...


class Backend(Protocol):
    """Runs sandboxes.

    Created by its module's `async def start(run_dir: Path, ...)`, which starts a sandbox as a test and raises
    BackendUnavailable with the reason and the fix.
    """

    name: str

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        ...

    async def create(self, spec: BoxSpec) -> Box:
        """Start a sandbox whose agent has answered INIT. Raises SandboxStartError."""
        ...

    async def restore(self, snapshot: Path, spec: BoxSpec) -> Box:
        """Start a sandbox from a snapshot of `Box.snapshot`, with fresh entropy and spec.host_name.

        The snapshot may come from another host, after a migration. Its directory is not changed, and can be restored
        several times, also concurrently.
        """
        ...

    async def died(self) -> str:
        """Wait until the backend itself fails, so that the server can't continue, and return the reason."""
        ...

    async def stop(self) -> None:
        """Destroy all sandboxes and remove all that the backend created."""
        ...
