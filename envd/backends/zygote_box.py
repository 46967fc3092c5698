"""Sandboxes that the Python zygote forks: what its two backends share."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.probing import probe
from envd.backends.proxied import environment_of, take_listener
from envd.backends.workspace_tar import load_workspace, save_workspace
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.sandbox.cgroups import box_groups, measure
from envd.sandbox.disk import Disk, disk_of
from envd.server.zygotes import Zygote


class ZygoteBox:
    """A `Box` of a zygote's."""

    def __init__(
        self,
        zygote: Zygote,
        where: dict[str, Path],
        spec: BoxSpec,
        guest: GuestLink,
        own_disk: bool,
        listener: socket.socket | None,
    ) -> None:
        """where: its control groups, by controller. own_disk: its files are on a disk of its own."""
        self._zygote, self._groups, self._spec, self._guest = zygote, where, spec, guest
        self._own_disk, self._listener = own_disk, listener

    @property
    def guest(self) -> GuestLink:
        """The agent in it."""
        return self._guest

    @property
    def proxy_listener(self) -> socket.socket | None:
        """See `OffersProxy`."""
        return self._listener

    async def pause(self) -> None:
        """Not to be had here."""
        raise EnvdError("the Python zygote's sandboxes can't be paused: install a C compiler and run `make install`")

    async def resume(self) -> None:
        """Not to be had here."""
        raise EnvdError("the Python zygote's sandboxes are never paused")

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write the workspace's files. Processes, memory and /tmp are not kept."""
        return await save_workspace(self._guest, into, self._spec.limits.disk_mb)

    async def usage(self) -> Usage:
        """What its groups count; 0 where it has none."""
        if self._guest.gone is not None:
            raise SandboxGone(self._guest.gone)
        return await asyncio.to_thread(self._measure)

    async def destroy(self) -> None:
        """End it and leave nothing."""
        if self._listener is not None:
            self._listener.close()
        await self._zygote.end_guest(self._spec.name, self._guest)

    def tell_refusals(self, tell: Callable[[str, int], None]) -> None:
        """See `TellsRefusals`. Never called where nothing filters system calls."""
        self._zygote.tell_refusals(self._spec.name, tell)

    def _measure(self) -> Usage:
        found = measure(self._groups)
        disk = disk_of(_one_of(self._groups)) if self._own_disk else Disk()
        return Usage(found.memory_bytes, found.pids, found.cpu_s, disk.used_bytes, found.events, disk.full)


class ZygoteBackend:
    """A `Backend` of one zygote."""

    def __init__(self, name: str, run_dir: Path, zygote: Zygote, groups: str, features: Features) -> None:
        self.name = name
        self._run_dir, self._zygote, self._groups, self._features = run_dir, zygote, groups, features

    @property
    def features(self) -> Features:
        """What it can do here."""
        return self._features

    async def create(self, spec: BoxSpec) -> ZygoteBox:
        """Start a sandbox. Raises SandboxStartError."""
        if spec.template_dir.parent != self._run_dir / "templates":
            raise SandboxStartError(f"template {spec.template[:12]} is not below {self._run_dir / 'templates'}")
        if spec.network and "network" not in self._features.can:
            raise SandboxStartError(f"the {self.name} backend allows no network: choose one whose features name it")
        if spec.read_only:
            raise SandboxStartError(
                f"the {self.name} backend of Python has no read-only workspaces: build the native one"
            )
        guest, listener = await self._start(spec)
        own_disk = self._features.isolation > IsolationLevel.NONE
        return ZygoteBox(self._zygote, box_groups(self._groups, spec.name), spec, guest, own_disk, listener)

    async def _start(self, spec: BoxSpec) -> tuple[GuestLink, socket.socket | None]:
        what = (spec.name, spec.template_dir.name, spec.limits, environment_of(spec), spec.host_name)
        if not spec.network:
            return await self._zygote.spawn_guest(*what), None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            guest = await self._zygote.spawn_guest(*what, theirs)
            theirs.close()
            try:
                return guest, await take_listener(ours)
            except BaseException as error:
                await self._zygote.end_guest(spec.name, guest)
                if isinstance(error, (SandboxGone, OSError)):
                    raise SandboxStartError(f"a sandbox could not start: {error}") from error
                raise

    async def restore(self, snapshot: Path, spec: BoxSpec) -> ZygoteBox:
        """Start a sandbox with a snapshot's files."""
        box = await self.create(spec)
        try:
            await load_workspace(box.guest, snapshot)
        except BaseException:
            await box.destroy()
            raise
        return box

    async def died(self) -> str:
        """Return when the zygote has ended by itself."""
        return await self._zygote.died()

    async def stop(self) -> None:
        """Destroy everything."""
        await self._zygote.stop()


async def start_zygote_backend(run_dir: Path, name: str, *, isolated: bool) -> ZygoteBackend:
    """Start a zygote and really start a sandbox in it. Raises BackendUnavailable."""
    for part in ("templates", "boxes"):
        (run_dir / part).mkdir(parents=True, exist_ok=True)
    groups = f"{run_dir.name}-{name}"
    zygote = await Zygote.start(run_dir, groups, "namespaces" if isolated else "plain", "agent")
    features = Features(
        isolation=IsolationLevel.PROCESS if isolated else IsolationLevel.NONE,
        limits_enforced=tuple(sorted({*zygote.enforced, "disk"})) if isolated else zygote.enforced,
        keeps_processes=False,
        can=frozenset(
            {"snapshot", "fork", "migrate", "network"} if isolated else {"snapshot", "fork", "migrate", "pty"}
        ),
        helper="python",
    )
    backend = ZygoteBackend(name, run_dir, zygote, groups, features)
    try:
        await probe(backend.create, run_dir / "templates", f"the {name} backend's Python zygote")
    except BaseException:
        await zygote.stop()
        raise
    return backend


def _one_of(groups: Mapping[str, Path]) -> int:
    """A process in these control groups, as this host counts; 0 where there is none. Not each of them need be one that is used."""
    for group in groups.values():
        try:
            return int(group.joinpath("cgroup.procs").read_text().split()[0])
        except (OSError, IndexError, ValueError):
            continue
    return 0
