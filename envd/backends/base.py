"""The protocol between the server and what runs sandboxes."""

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
    """How strong a wall is; sandbox rules name the least they accept."""

    NONE = 0
    """Ordinary processes of the host."""
    PROCESS = 1
    """Namespaces, seccomp, Landlock and cgroups over the host's kernel."""
    KERNEL = 2
    """A kernel of its own in user space (gVisor)."""
    MACHINE = 3
    """A virtual machine."""


@dataclass(frozen=True)
class NetworkRule:
    """One destination a sandbox may open connections to."""

    host: str
    """A name, an address, or a network as 10.0.0.0/8."""
    ports: tuple[int, ...] = ()
    """Empty: any."""


@dataclass(frozen=True)
class BoxSpec:
    """What a sandbox is to be."""

    name: str
    """Unique on this server, a safe file name; never an id that clients see."""
    template: str
    """Digest of the template."""
    template_dir: Path
    """Its files on this host, owned by `sandbox_owner()`, never to be changed."""
    limits: Limits
    env: Mapping[str, str] = field(default_factory=dict)
    host_name: str = "sandbox"
    network: tuple[NetworkRule, ...] = ()
    """Empty: a private loopback and nothing else."""
    read_only: bool = False
    """The workspace can't be written (`filesystem.read_only` of the rules)."""
    supervised: bool = False
    """For a verification: where the backend can, its first user may become others, so that what judges and what is
    judged are two.
    """


@dataclass(frozen=True)
class Usage:
    """What a sandbox uses now. 0 where the backend can't tell."""

    memory_bytes: int = 0
    pids: int = 0
    cpu_s: float = 0.0
    disk_bytes: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    """How often a limit was hit: memory, pids."""
    disk_full: bool = False
    """Its disk has no room left, for bytes or for files. False where the backend can't tell."""


@dataclass(frozen=True)
class Features:
    """What a backend can do. Services refuse what it can't with UNIMPLEMENTED and the backend's name."""

    isolation: IsolationLevel
    limits_enforced: tuple[str, ...]
    """Of memory, pids, cpu, disk."""
    keeps_processes: bool
    """Snapshots hold memory and processes; else files only."""
    can: frozenset[str]
    """Of pause, snapshot, fork, migrate, pty, network. Hibernation is a snapshot."""
    helper: str
    """What starts sandboxes: `native`, or a program and its version."""

    @property
    def offered(self) -> frozenset[str]:
        """What it can do, as clients are told: a snapshot makes hibernation possible."""
        return self.can | ({"hibernate"} if "snapshot" in self.can else set())


class Box(Protocol):
    """One running sandbox. Its methods raise SandboxGone when it has ended, EnvdError with the reason otherwise."""

    @property
    def guest(self) -> GuestLink:
        """The agent in it."""
        ...

    async def pause(self) -> None:
        """Stop every process where it stands."""
        ...

    async def resume(self) -> None:
        """Let them go on."""
        ...

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write all of its state below `into` (an empty directory) and run on.

        Returns what is not kept, e.g. ("processes",).
        """
        ...

    async def usage(self) -> Usage:
        """What it uses now."""
        ...

    async def destroy(self) -> None:
        """End it and leave nothing: no process, mount, cgroup, directory. Idempotent."""
        ...


@runtime_checkable
class TellsRefusals(Protocol):
    """A box that knows which system calls the code in it was refused."""

    def tell_refusals(self, tell: Callable[[str, int], None]) -> None:
        """Call `tell` with the name of each call that is refused from now on and how often it was since; a few times a
        second at most.
        """
        ...


@runtime_checkable
class KeepsTemplates(Protocol):
    """A backend that keeps something of its own of a template: disks, or sandboxes that are started before they are
    asked for.
    """

    async def forget_template(self, template: str) -> None:
        """Let go of what is kept of a template, which no sandbox uses, and which is removed."""
        ...


@runtime_checkable
class OffersProxy(Protocol):
    """A box in which a port leads to the server's proxy, where its rules allow destinations."""

    @property
    def proxy_listener(self) -> socket.socket | None:
        """What the server accepts connections by, until the box is destroyed; None where it has no destinations."""
        ...


class Backend(Protocol):
    """Runs sandboxes.

    Made by its module's `async def start(run_dir: Path, ...)`, which probes by really starting one and raises
    BackendUnavailable with the reason and the fix.
    """

    name: str

    @property
    def features(self) -> Features:
        """What it can do here."""
        ...

    async def create(self, spec: BoxSpec) -> Box:
        """Start a sandbox whose agent has answered INIT. Raises SandboxStartError."""
        ...

    async def restore(self, snapshot: Path, spec: BoxSpec) -> Box:
        """Start a sandbox from what `Box.snapshot` wrote (on this host or, after a migration, on another), with fresh
        entropy and spec.host_name.

        The snapshot's directory may be restored from several times, also at the same time, and is not changed.
        """
        ...

    async def died(self) -> str:
        """Return, with the reason, when the backend itself has failed and the server can't go on."""
        ...

    async def stop(self) -> None:
        """Destroy everything and leave nothing behind."""
        ...
