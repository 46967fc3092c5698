"""Sandboxes that the Python zygote forks: what its two backends share."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from envd.backends.base import BoxSpec, Features, IsolationLevel, Usage
from envd.backends.workspace_tar import load_workspace, save_workspace
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, SandboxStartError
from envd.guest.link import GuestLink
from envd.sandbox.cgroups import box_groups
from envd.sandbox.linux import sandbox_owner
from envd.server.zygotes import Zygote
from envd.types import Limits

_PROBE = "envd-probe"


class ZygoteBox:
    """A `Box` of a zygote's."""

    def __init__(self, zygote: Zygote, groups: str, spec: BoxSpec, guest: GuestLink) -> None:
        self._zygote, self._groups, self._spec, self._guest = zygote, groups, spec, guest

    @property
    def guest(self) -> GuestLink:
        """The agent in it."""
        return self._guest

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
        """What its group counts; 0 where it has none."""
        if self._guest.gone is not None:
            raise SandboxGone(self._guest.gone)
        return await asyncio.to_thread(_usage, self._groups, self._spec.name)

    async def destroy(self) -> None:
        """End it and leave nothing."""
        await self._zygote.end_guest(self._spec.name, self._guest)


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
        if spec.network:
            raise SandboxStartError(f"the {self.name} backend allows no network: choose one whose features name it")
        if spec.read_only:
            raise SandboxStartError(
                f"the {self.name} backend of Python has no read-only workspaces: build the native one"
            )
        template = spec.template_dir.name
        guest = await self._zygote.spawn_guest(spec.name, template, spec.limits, spec.env, spec.host_name)
        return ZygoteBox(self._zygote, self._groups, spec, guest)

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
        can=frozenset({"snapshot", "fork", "migrate"} if isolated else {"snapshot", "fork", "migrate", "pty"}),
        helper="python",
    )
    backend = ZygoteBackend(name, run_dir, zygote, groups, features)
    try:
        await _probe(backend, run_dir / "templates")
    except BaseException:
        await zygote.stop()
        raise
    return backend


async def _probe(backend: ZygoteBackend, templates: Path) -> None:
    template = templates / f"{_PROBE}-{backend.name}"
    owner = sandbox_owner()
    try:
        template.mkdir()
        (template / "probe").write_bytes(b"probe\n")
        for path in (template, template / "probe"):
            os.chown(path, owner, owner)
        box = await backend.create(BoxSpec(template.name, template.name, template, Limits()))
        try:
            (result,) = await box.guest.shell([("cat probe", 20.0)])
        finally:
            await box.destroy()
    except (OSError, EnvdError) as error:
        raise BackendUnavailable(f"a sandbox of the {backend.name} backend does not start: {error}") from error
    finally:
        shutil.rmtree(template, ignore_errors=True)
    if (result.code, result.head) != (0, b"probe\n"):
        said = result.head.decode(errors="replace").strip()
        raise BackendUnavailable(f"a sandbox of the {backend.name} backend can't run commands: {said[:300]!r}")


def _usage(groups: str, group: str) -> Usage:
    where = box_groups(groups, group)

    def number(controller: str, name: str) -> int:
        try:
            return int((where[controller] / name).read_text())
        except (KeyError, OSError, ValueError):
            return 0

    def field(controller: str, name: str, key: str) -> int:
        try:
            words = dict(line.split() for line in (where[controller] / name).read_text().splitlines())
            return int(words[key])
        except (KeyError, OSError, ValueError):
            return 0

    events = {
        "memory": field("memory", "memory.oom_control", "oom_kill") or field("unified", "memory.events", "oom_kill"),
        "pids": field("pids", "pids.events", "max") or field("unified", "pids.events", "max"),
    }
    return Usage(
        memory_bytes=number("memory", "memory.usage_in_bytes") or number("unified", "memory.current"),
        pids=number("pids", "pids.current") or number("unified", "pids.current"),
        cpu_s=field("unified", "cpu.stat", "usage_usec") / 1e6,
        events={key: count for key, count in events.items() if count},
    )
