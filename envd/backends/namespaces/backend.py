"""Sandboxes in namespaces of the host's kernel, started by the native spawner.

create: from the warm pool, else envd-spawn --clone--> process 1 = the agent --stream--> GuestLink
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from contracts.errors import describe
from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.namespaces.proxied import environment_of, take_listener
from envd.backends.namespaces.spawner import Spawner, Started
from envd.backends.pool import Pool
from envd.backends.probing import probe
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.native import spawner_binary
from envd.sandbox.cgroups import box_groups, freeze, measure
from envd.sandbox.disk import disk_of

_FILES = "files.tar"
_ABOUT = "snapshot.json"
_DESTROY_S = 30.0
_BERTHS = 4
"""Number of ended sandboxes whose groups and networks are kept per sandbox of the pool, since many end at a time."""
_log = logging.getLogger("envd")


class NamespacesBox:
    """A `Box` that the native spawner started."""

    def __init__(
        self,
        backend: NamespacesBackend,
        spec: BoxSpec,
        started: Started,
        guest: GuestLink,
        listener: socket.socket | None = None,
    ) -> None:
        self._backend, self._started, self._guest = backend, started, guest
        self.spec, self._listener = spec, listener
        self._groups = backend.groups_of(started.groups)
        self._paused = self._changed = False

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        return self._guest

    @property
    def proxy_listener(self) -> socket.socket | None:
        """See `OffersProxy`."""
        return self._listener

    @property
    def alive(self) -> bool:
        """Whether the sandbox is usable."""
        return self._guest.gone is None and not self._started.ended.done()

    async def pause(self) -> None:
        """Freeze the sandbox's control group. Raises EnvdError."""
        self._check()
        if "pause" not in self._backend.features.can:
            raise EnvdError("pausing sandboxes needs a writable control group v2")
        if not self._paused:
            self._guest.hold()
            self._changed = True
            try:
                await freeze(self._groups, True)
            except BaseException:
                await self._thaw()
                raise
            self._paused = True

    async def resume(self) -> None:
        """Thaw the sandbox's control group. Raises EnvdError."""
        self._check()
        if self._paused:
            await self._thaw()
            self._paused = False

    async def _thaw(self) -> None:
        if self.alive:  # else another sandbox may have its groups
            await freeze(self._groups, False)
        self._guest.release()

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write the files that the sandbox changed below its workspace and /tmp.

        Pauses the sandbox meanwhile if the backend can.
        """
        self._check()
        stopped = not self._paused and "pause" in self._backend.features.can
        if stopped:
            await self.pause()
        try:
            with (into / _FILES).open("xb") as file:
                await self._backend.spawner.archive(self._started, file.fileno())
                await asyncio.to_thread(os.fsync, file.fileno())
        finally:
            if stopped and self.alive:
                await self.resume()
        (into / _ABOUT).write_text(json.dumps({"backend": self._backend.name, "template": self.spec.template}))
        return ("processes",)

    async def usage(self) -> Usage:
        """Usage from the counters of its control groups, and of its disk."""
        self._check()
        found = measure(self._groups)
        disk = disk_of(self._started.pid)
        cpu_s = max(0.0, found.cpu_s - self._started.used_before_us / 1e6)
        return Usage(found.memory_bytes, found.pids, cpu_s, disk.used_bytes, found.events, disk.full)

    async def destroy(self) -> None:
        """Kill all processes of the sandbox and wait until nothing is left. Raises EnvdError."""
        self._backend.spawner.kill(self._started, changed=self._changed)
        self._guest.close()  # after the kill: the spawner can reuse the resources of a sandbox that still runs
        if self._listener is not None:
            self._listener.close()
        try:
            async with asyncio.timeout(_DESTROY_S):
                await asyncio.shield(self._started.ended)
        except TimeoutError as error:
            raise EnvdError(
                f"sandbox {self.spec.name} does not end within {_DESTROY_S:g} s: a process hangs in the kernel"
            ) from error

    def tell_refusals(self, tell: Callable[[str, int], None]) -> None:
        """See `TellsRefusals`."""
        self._started.on_refused = tell

    def _check(self) -> None:
        if self._started.ended.done() or (self._guest.gone is not None and self._started.events):
            hit = ", ".join(f"{key} {count} times" for key, count in self._started.events.items())
            raise SandboxGone(f"the sandbox ended{': it hit its limits: ' + hit if hit else ''}")
        if self._guest.gone is not None:
            raise SandboxGone(self._guest.gone)


class NamespacesBackend:
    """A `Backend` of one native spawner."""

    name = "namespaces"

    def __init__(self, run_dir: Path, spawner: Spawner, groups: str, pool: int) -> None:
        self.spawner = spawner
        self._templates = run_dir / "templates"
        self._groups = box_groups(groups, ".")
        walls = set(spawner.walls)
        can = {
            "snapshot",
            "fork",
            "migrate",
            "pty",
            "network",
            "runtime",
            "root",
            *(["pause"] if "unified" in self._groups else []),
        }
        limits = tuple(sorted(walls & {"memory", "pids", "cpu"} | {"disk"}))
        self._features = Features(IsolationLevel.PROCESS, limits, False, frozenset(can), "native")
        self.pool = Pool(self._start, pool, warm=_warm, width=len(os.sched_getaffinity(0)))

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        return self._features

    def groups_of(self, name: str) -> dict[str, Path]:
        """Paths of a sandbox's control groups, by controller."""
        return {controller: base / (name or "ended") for controller, base in self._groups.items()}

    async def create(self, spec: BoxSpec) -> NamespacesBox:
        """Take a sandbox from the pool, or start one. Raises SandboxStartError."""
        self._accept(spec)
        box = self.pool.take(spec) or await self.pool.under_way(spec)
        if box is None:
            with self.pool.busy():
                return await self._start(spec)
        box.spec = spec
        return box

    async def restore(self, snapshot: Path, spec: BoxSpec) -> NamespacesBox:
        """Start a sandbox with a snapshot's files. Raises SandboxStartError."""
        self._accept(spec)
        try:
            about = json.loads((snapshot / _ABOUT).read_text())
            archive = os.open(snapshot / _FILES, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"{snapshot} holds no snapshot of the namespaces backend ({error})") from error
        try:
            if about.get("template") != spec.template:
                raise SandboxStartError(
                    f"the snapshot is of template {about.get('template')!r}: restore it with that one"
                )
            with self.pool.busy():
                return await self._start(spec, archive)
        finally:
            os.close(archive)

    async def forget(self, digest: str) -> None:
        """See `Forgets`."""
        await self.pool.forget(digest)

    async def died(self) -> str:
        """Wait until the spawner ends by itself, and return the reason."""
        return await self.spawner.died()

    async def stop(self) -> None:
        """Destroy all sandboxes and stop the spawner."""
        await self.pool.stop()
        await self.spawner.stop()

    def _accept(self, spec: BoxSpec) -> None:
        if spec.template_dir.parent != self._templates:
            raise SandboxStartError(f"template {spec.template[:12]} is not below {self._templates}")

    async def _start(self, spec: BoxSpec, archive: int | None = None) -> NamespacesBox:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise SandboxStartError(f"a sandbox could not start: {describe(error)}") from error
        started: Started | None = None
        listener: socket.socket | None = None
        guest: GuestLink | None = None
        try:
            with theirs:
                started = self.spawner.create(
                    theirs,
                    template=spec.template_dir.name,
                    runtime=spec.runtime,
                    host_name=spec.host_name,
                    limits=spec.limits,
                    read_only=spec.read_only,
                    proxy=bool(spec.network),
                    archive=archive,
                )
            if spec.network:
                listener = await take_listener(ours)  # arrives before the agent's data
            guest = await GuestLink.over_socket(ours)
            await guest.init(host_name=spec.host_name, env=environment_of(spec))
            await asyncio.shield(started.running)
            return NamespacesBox(self, spec, started, guest, listener)
        except BaseException as error:
            for each in (listener, guest, ours):
                if each is not None:
                    each.close()
            if started is None:
                raise
            self.spawner.kill(started)
            if not isinstance(error, (SandboxGone, OSError)):
                raise
            await asyncio.wait([started.ended], timeout=_DESTROY_S)
            hit = " and ".join(started.events)
            guess = f"its {hit} limit was hit" if hit else "its memory or pid limit may be too low"
            reason = started.failure or f"{error}; {guess}"
            raise SandboxStartError(f"a sandbox could not start: {reason}") from error


async def start(run_dir: Path, pool: int = 0) -> NamespacesBackend:
    """Start the backend and test it by starting a sandbox. Raises BackendUnavailable.

    pool: number of sandboxes kept ready for each requested template and limits.
    """
    program = spawner_binary()
    (run_dir / "templates").mkdir(parents=True, exist_ok=True)
    groups = f"{run_dir.name}-native"
    spawner = await Spawner.start(run_dir, groups, program, _BERTHS * pool)
    backend = NamespacesBackend(run_dir, spawner, groups, pool)
    try:
        await probe(backend._start, run_dir / "templates", "the namespaces backend")
    except BaseException:
        await backend.stop()
        raise
    return backend


async def _warm(box: NamespacesBox) -> None:
    """Start the sandbox's shell, which takes as long as its start. Raises EnvdError and destroys the sandbox."""
    try:
        await box.guest.warm_shell()
    except (SandboxGone, OSError) as error:
        await box.destroy()
        raise SandboxStartError(f"a sandbox's shell could not start: {error}") from error
