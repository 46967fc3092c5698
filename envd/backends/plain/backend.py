"""Sandboxes as ordinary processes of the host, in a copy of the template. They isolate nothing: only for trusted code,
or machines where no other backend works.

server --starts--> envd-guest --supervised = supervisor --fork--> agent --stream--> GuestLink

If the agent is killed, the supervisor ends the processes that it leaves. Both enter the sandbox's control groups before
they start other processes.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import socket
import sys
from pathlib import Path

from contracts.owned import remove
from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.probing import probe
from envd.backends.vm.process import VmmProcess
from envd.backends.workspace_tar import load_workspace, save_workspace
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.native import guest_binary
from envd.sandbox.cgroups import Cgroups, box_groups, measure
from envd.sandbox.place import sandbox_environment
from envd.sandbox.proctree import kill_since
from envd.types import Limits

_OPEN_FILES = 1024
_DESTROY_S = 20.0
_GROUP_S = 5.0
"""Maximum time in seconds for the last processes of a sandbox's control groups to end."""
_MIB = 1024 * 1024


class PlainBox:
    """A `Box` whose agent is a process of the server's own user."""

    def __init__(self, backend: PlainBackend, spec: BoxSpec, process: VmmProcess, guest: GuestLink) -> None:
        self._backend, self._spec, self._process, self._guest = backend, spec, process, guest

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        return self._guest

    async def pause(self) -> None:
        """Raise EnvdError: not supported."""
        raise EnvdError("sandboxes of the plain backend can't be paused: choose another backend")

    async def resume(self) -> None:
        """Raise EnvdError: not supported."""
        raise EnvdError("sandboxes of the plain backend are never paused")

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write the workspace's files. Processes, memory and the temporary directory are not kept."""
        return await save_workspace(self._guest, into, self._spec.limits.disk_mb)

    async def usage(self) -> Usage:
        """Usage from the counters of its control groups; 0 if it has none. Raises SandboxGone."""
        if self._guest.gone is not None:
            raise SandboxGone(self._guest.gone)
        found = await asyncio.to_thread(measure, self._backend.groups_of(self._spec.name))
        return Usage(found.memory_bytes, found.pids, found.cpu_s, events=found.events)

    async def destroy(self) -> None:
        """Kill all processes of the sandbox and remove its files and control groups. Idempotent."""
        self._guest.close()
        await self._backend.end(self._spec.name, self._process)
        await self._guest.closed()


class PlainBackend:
    """A `Backend` without isolation."""

    name = "plain"

    def __init__(self, run_dir: Path, program: Path, groups: Cgroups, groups_name: str) -> None:
        self._templates, self._boxes, self._program = run_dir / "templates", run_dir / "boxes", program
        self._groups, self._groups_name = groups, groups_name
        can = frozenset({"snapshot", "fork", "migrate", "pty"})
        self._features = Features(IsolationLevel.NONE, groups.enforced, False, can, "native")

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        return self._features

    def groups_of(self, name: str) -> dict[str, Path]:
        """Paths of a sandbox's control groups, by controller."""
        return box_groups(self._groups_name, name)

    async def create(self, spec: BoxSpec) -> PlainBox:
        """Start a sandbox. Raises SandboxStartError."""
        if spec.template_dir.parent != self._templates:
            raise SandboxStartError(f"template {spec.template[:12]} is not below {self._templates}")
        if spec.network:
            raise SandboxStartError("the plain backend allows no network: choose one whose features name it")
        if spec.read_only:
            raise SandboxStartError("the plain backend has no read-only workspaces: choose another backend")
        box = self._boxes / spec.name
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: VmmProcess | None = None
        guest: GuestLink | None = None
        try:
            with theirs:
                await asyncio.to_thread(_make_directories, spec.template_dir, box)
                process = await self._launch(spec, box, theirs.fileno())
            guest = await GuestLink.over_socket(ours)
            await guest.init(host_name=spec.host_name, env=spec.env)
            return PlainBox(self, spec, process, guest)
        except BaseException as error:
            (guest or ours).close()
            await self.end(spec.name, process)
            if not isinstance(error, (SandboxGone, OSError)):
                raise
            said = process.said if process is not None else ""
            raise SandboxStartError(
                f"a sandbox could not start ({said or error}): its memory or pid limit may be too low"
            ) from error

    async def restore(self, snapshot: Path, spec: BoxSpec) -> PlainBox:
        """Start a sandbox with a snapshot's files."""
        box = await self.create(spec)
        try:
            await load_workspace(box.guest, snapshot)
        except BaseException:
            await box.destroy()
            raise
        return box

    async def end(self, name: str, process: VmmProcess | None) -> None:
        """End a sandbox's processes; remove its directory and its control groups.

        Raises EnvdError if a process hangs.
        """
        if process is not None and not process.ended.done():
            await asyncio.to_thread(kill_since, process.pid, frozenset(), lambda: None)
            process.kill()
            try:
                await asyncio.wait_for(process.wait(), _DESTROY_S)
            except TimeoutError as error:
                raise EnvdError(
                    f"sandbox {name} does not end within {_DESTROY_S:g} s: a process hangs in the kernel"
                ) from error
        await asyncio.to_thread(remove, self._boxes / name)
        deadline = asyncio.get_running_loop().time() + _GROUP_S
        while not self._groups.remove(name) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)

    async def died(self) -> str:
        """Never return, since the backend has no process of its own that could fail."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        """Remove the control groups. Call after all sandboxes are destroyed."""
        await asyncio.to_thread(self._groups.close)

    async def _launch(self, spec: BoxSpec, box: Path, stream: int) -> VmmProcess:
        limits = spec.limits
        groups = await asyncio.to_thread(
            self._groups.entrance_files, spec.name, memory=limits.memory_mb * _MIB, pids=limits.pids, cpu=limits.cpu
        )
        where = ["--workspace", str(box / "workspace"), "--scratch", str(box / "scratch")]
        return VmmProcess(
            [*self._limited(limits), str(self._program), "--supervised", "--fd", str(stream), *where],
            [stream],
            directory=box / "workspace",
            groups=groups,
            environment=sandbox_environment(str(box / "tmp"), str(Path(sys.prefix) / "bin")),
            mute=True,
        )

    def _limited(self, limits: Limits) -> list[str]:
        """The command line prefix that sets resource limits.

        No process limit: the kernel counts all processes of the user.
        """
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        files = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
        wanted = {"core": 0, "nofile": files, "fsize": limits.disk_mb * _MIB, "rtprio": 0, "nice": 0}
        if "memory" not in self._groups.enforced:
            wanted["as"] = limits.memory_mb * _MIB
        return ["prlimit", *(f"--{name}={value}" for name, value in wanted.items()), "--"]


async def start(run_dir: Path) -> PlainBackend:
    """Start the backend and test it by starting a sandbox. Raises BackendUnavailable."""
    if shutil.which("prlimit") is None:
        raise BackendUnavailable("plain sandboxes are limited by prlimit: install Debian's package util-linux")
    program = guest_binary()
    for part in ("templates", "boxes"):
        (run_dir / part).mkdir(parents=True, exist_ok=True)
    name = f"{run_dir.name}-plain"
    backend = PlainBackend(run_dir, program, await asyncio.to_thread(Cgroups, name), name)
    try:
        await probe(backend.create, run_dir / "templates", "the plain backend")
    except BaseException:
        await backend.stop()
        raise
    return backend


def _make_directories(template: Path, box: Path) -> None:
    if not template.is_dir():
        raise FileNotFoundError(f"no template {template.name}")
    shutil.copytree(template, box / "workspace", symlinks=True)
    (box / "tmp").mkdir()
