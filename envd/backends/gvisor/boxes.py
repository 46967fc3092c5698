"""gVisor sandboxes, run by commands of `runsc`. Snapshots keep memory, processes and files.

    create    runsc run --detach             agent over the socket that is its standard input
    snapshot  runsc checkpoint --leave-running
    restore   runsc restore --detach         a new socket replaces the old one; the escaped stream restarts on it

The agent has a socket instead of pipes: gVisor lets each process of a sandbox open the pipes of others through
/proc/PID/fd, but not their sockets.

All commands of runsc and the processes that they leave run in one stage (`envd.backends.gvisor.stage`), which the
server starts.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.gvisor.bundle import AGENT, write_bundle
from envd.backends.gvisor.server import Stage
from envd.backends.pool import Pool
from envd.errors import EnvdError, SandboxGone, SandboxStartError, Unsupported
from envd.guest.link import GuestLink
from envd.sandbox.cgroups import box_groups, measure
from envd.types import Limits

KERNEL_BYTES = 96 * 1024 * 1024
"""Memory in bytes beyond a sandbox's limit, for its kernel and the gofer."""
KERNEL_PIDS = 256
"""Number of host threads beyond a sandbox's pid limit, for its kernel and the gofer."""
_MIB = 1024 * 1024
_ANSWER_S = 60.0
_COMMAND_S = 60.0
_IMAGE_S = 600.0
"""Maximum time in seconds to write or read a snapshot."""
_RUN = ("run", "--detach")
_NO_NETWORK = "the gvisor backend gives a sandbox no network: choose another backend, or rules without network.allow"
_MANIFEST = "manifest.json"
_LAYOUT = 2
"""Version of the bundles' layout; a snapshot can be restored only into the layout that it was taken in."""


class GVisorBox:
    """One running gVisor sandbox."""

    def __init__(self, backend: GVisorBackend, spec: BoxSpec, guest: GuestLink) -> None:
        self._backend = backend
        self._spec = spec
        self._guest = guest
        self._destroying: asyncio.Task[None] | None = None
        self._paused = False
        self._turn = asyncio.Lock()

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        return self._guest

    @property
    def alive(self) -> bool:
        """Whether the sandbox is usable."""
        return self._guest.gone is None and self._destroying is None

    async def pause(self) -> None:
        """Pause all processes of the sandbox. Idempotent. Raises EnvdError."""
        async with self._turn:
            if self._paused:  # runsc refuses to pause twice
                return
            self._paused = True  # also for a caller that is cancelled: runsc continues
            self._guest.hold()
            try:
                await self._runsc("pause", self._spec.name)
            except EnvdError:
                self._paused = False
                self._guest.release()
                raise

    async def resume(self) -> None:
        """Resume all processes of the sandbox. Idempotent. Raises EnvdError."""
        async with self._turn:
            if self._paused:
                await self._runsc("resume", self._spec.name)
                self._paused = False
                self._guest.release()

    async def snapshot(self, into: Path) -> tuple[str, ...]:
        """Write memory, processes and files below `into`; the sandbox continues to run. Raises EnvdError.

        Keeps everything except connections to other sandboxes.
        """
        image = os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._guest.hold()
        try:
            await self._runsc(
                "checkpoint",
                "--leave-running",
                "--compression=none",
                "--image-path=/proc/self/fd/3",
                self._spec.name,
                image=image,
            )
        finally:
            if not self._paused:
                self._guest.release()
            os.close(image)
        (into / _MANIFEST).write_text(json.dumps(self._backend.manifest))
        return ()

    async def usage(self) -> Usage:
        """Current usage, including the sandbox's kernel."""
        used = measure(box_groups(self._backend.stage.groups, self._spec.name))
        # Without pids: the host sees threads of the sandbox's kernel, not the sandbox's processes.
        return Usage(memory_bytes=used.memory_bytes, cpu_s=used.cpu_s, events=used.events)

    async def destroy(self) -> None:
        """Kill the sandbox and remove its files. Idempotent; continues if the caller is cancelled."""
        if self._destroying is None:
            self._guest.close()
            self._destroying = asyncio.create_task(self._backend.end(self._spec.name))
        await asyncio.shield(self._destroying)

    async def _runsc(self, command: str, *arguments: str, image: int | None = None) -> None:
        if not self.alive:
            raise SandboxGone(self._guest.gone or "the sandbox was destroyed")
        await self._backend.runsc(self._spec.name, [command, *arguments], image=image)


class GVisorBackend:
    """Runs sandboxes by `runsc`."""

    name = "gvisor"

    def __init__(self, stage: Stage, runsc: Path, version: str, agent: Path, pool: int) -> None:
        self.stage = stage
        self._runsc = runsc
        self._version = version
        self._agent = agent
        self._starting = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        self._pooled = itertools.count(1)
        self.pool = Pool(self._start_pooled, pool)
        self.manifest = {
            "layout": _LAYOUT,
            "runsc": version,
            "agent": hashlib.sha256((agent / "envd-guest").read_bytes()).hexdigest(),
        }
        """Properties that must be equal where a snapshot is taken and where it is restored."""

    @property
    def features(self) -> Features:
        """Features of this backend on this host."""
        return Features(
            isolation=IsolationLevel.KERNEL,
            limits_enforced=tuple(sorted({*self.stage.enforced, "pids", "disk"})),
            keeps_processes=True,
            can=frozenset(("pause", "snapshot", "fork", "migrate", "pty", "runtime", "root")),
            helper=self._version,
        )

    async def create(self, spec: BoxSpec) -> GVisorBox:
        """Take a sandbox from the pool, or start one. Raises SandboxStartError."""
        if spec.network:
            raise Unsupported(_NO_NETWORK)
        box = self.pool.take(spec)
        if box is not None:
            return box
        with self.pool.busy():
            return await self._start(spec, _RUN)

    async def restore(self, snapshot: Path, spec: BoxSpec) -> GVisorBox:
        """Start a sandbox from a snapshot. Raises SandboxStartError.

        Its limits of processes and disk are those of the sandbox that the snapshot was taken of.
        """
        if spec.network:
            raise Unsupported(_NO_NETWORK)
        try:
            found = json.loads((snapshot / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"no gvisor snapshot: {error}") from error
        for key, value in self.manifest.items():
            if found.get(key) != value:
                raise SandboxStartError(
                    f"the snapshot was taken with another {key} ({found.get(key)!r}, here {value!r}): restore it on a"
                    " server that has the same"
                )
        image = os.open(snapshot, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with self.pool.busy():
                box = await self._start(spec, ["restore", "--detach", "--image-path=/proc/self/fd/3"], image=image)
        finally:
            os.close(image)
        try:
            # The agent lacks the capability to set the host name; runsc can give it to a process that it adds.
            await self.runsc(
                spec.name, ["exec", "--cap=CAP_SYS_ADMIN", spec.name, AGENT, "--name-host", spec.host_name]
            )
        except BaseException:
            await box.destroy()
            raise
        return box

    async def runsc(self, box: str, arguments: Sequence[str], *, image: int | None = None) -> None:
        """Run a command of runsc on a running box. Raises EnvdError with the command's message."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            descriptors = [null, null, *([image] if image is not None else [])]
            timeout_s = _COMMAND_S if image is None else _IMAGE_S
            done = await self.stage.run(box, self._command(arguments), descriptors, timeout_s=timeout_s)
        finally:
            os.close(null)
        if done.code:
            raise EnvdError(f"runsc {arguments[0]} failed: {_last(done.said) or f'code {done.code}'}")

    async def end(self, box: str) -> None:
        """Kill all processes of a box and remove its files."""
        await self.stage.end(box)
        await asyncio.to_thread(self._clear, box)

    async def forget(self, digest: str) -> None:
        """See `Forgets`."""
        await self.pool.forget(digest)

    async def died(self) -> str:
        """Wait until the stage fails, and return the reason."""
        return await self.stage.died()

    async def stop(self) -> None:
        """Destroy all sandboxes and stop the stage."""
        await self.pool.stop()
        await self.stage.stop()

    async def _start_pooled(self, spec: BoxSpec) -> GVisorBox:
        box = await self._start(replace(spec, name=f"pool-{next(self._pooled)}"), _RUN)
        try:
            await box.guest.shell([("true", _COMMAND_S)])  # start its shell in advance
        except BaseException:
            await box.destroy()
            raise
        return box

    async def _start(self, spec: BoxSpec, command: Sequence[str], *, image: int | None = None) -> GVisorBox:
        async with self._starting:
            guest: GuestLink | None = None
            try:
                guest = await self._started(spec, command, image)
                async with asyncio.timeout(_ANSWER_S):
                    await guest.init(host_name=spec.host_name, env=spec.env)
            except BaseException as error:
                if guest is not None:
                    guest.close()
                await asyncio.shield(asyncio.ensure_future(self.end(spec.name)))
                if isinstance(error, SandboxGone | OSError | TimeoutError):
                    why = f"a sandbox could not start ({error}): its memory or disk limit may be too low"
                    raise SandboxStartError(why) from error
                raise
        return GVisorBox(self, spec, guest)

    async def _started(self, spec: BoxSpec, command: Sequence[str], image: int | None) -> GuestLink:
        if not spec.template_dir.is_dir():
            raise SandboxStartError(f"a sandbox could not start: its template {spec.template_dir} does not exist")
        templates = await self.stage.show(spec.template_dir.parent)
        bundle, runtime = self.stage.directory / "boxes" / spec.name, ""
        if spec.runtime is not None:
            runtimes = await self.stage.show(spec.runtime.directory.parent)
            runtime = f"{runtimes}/{spec.runtime.directory.name}"
        write_bundle(
            bundle,
            spec,
            base=self.stage.base,
            template=f"{templates}/{spec.template_dir.name}",
            agent=await self.stage.show(self._agent),
            runtime=runtime,
        )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                descriptors = [theirs.fileno(), theirs.fileno(), *([image] if image is not None else [])]
                arguments = [*command, f"--bundle={bundle}", spec.name]
                done = await self.stage.run(
                    spec.name,
                    self._command(arguments),
                    descriptors,
                    _limits(spec.limits),
                    timeout_s=_COMMAND_S if image is None else _IMAGE_S,
                )
            if done.code:
                raise SandboxStartError(
                    f"a sandbox could not start: {_last(done.said) or f'runsc ended with {done.code}'}"
                )
            return await GuestLink.over_socket(ours, escaped=True)
        except BaseException as error:
            ours.close()
            if isinstance(error, EnvdError) and not isinstance(error, SandboxStartError):
                raise SandboxStartError(f"a sandbox could not start: {error}") from error
            raise

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [
            str(self._runsc),
            f"--root={self.stage.directory / 'state'}",
            "--platform=systrap",
            "--network=none",
            "--overlay2=none",
            "--file-access-mounts=exclusive",
            "--ignore-cgroups",
            *arguments,
        ]

    def _clear(self, box: str) -> None:
        shutil.rmtree(self.stage.directory / "boxes" / box, ignore_errors=True)
        for name in (f"{box}_sandbox:{box}.state", f"{box}_sandbox:{box}.lock", f"runsc-{box}.sock"):
            (self.stage.directory / "state" / name).unlink(missing_ok=True)


def _limits(limits: Limits) -> tuple[int, int, float]:
    return limits.memory_mb * _MIB + KERNEL_BYTES, limits.pids + KERNEL_PIDS, limits.cpu


def _last(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1][-500:] if lines else ""
