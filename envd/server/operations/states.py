"""State changes of a sandbox: pause, resume, hibernate, fork, snapshot, restore.

    running <-> paused        processes frozen, in memory
    running <-> hibernated    state on disk, nothing in memory

State changes of one sandbox run one at a time. A change continues when its caller is cancelled, and leaves the sandbox
as it was if it fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.errors import EnvdError, Unsupported
from envd.messages import limits_message
from envd.server.admission import Wanted
from envd.server.live import Live
from envd.server.sandboxes import Sandboxes
from envd.server.snapshots import link_tree, remove_tree

T = TypeVar("T")


class States:
    """Performs the state changes of a server's sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def pause(self, live: Live) -> None:
        """Freeze a sandbox's processes. Idempotent; a hibernated sandbox stays hibernated."""
        await self._sandboxes.finished(self._pause(live))

    async def resume(self, live: Live) -> None:
        """Resume a paused or hibernated sandbox. Idempotent."""
        await self._sandboxes.finished(self._resume(live))

    async def hibernate(self, live: Live) -> None:
        """Store a sandbox's state on disk and end its processes. Idempotent."""
        await self._sandboxes.finished(self._hibernate(live))

    async def fork(self, live: Live) -> Live:
        """Start an independent copy of a sandbox. If the caller is cancelled, the copy is ended."""
        return await self.handed_over(self._fork(live), self._sandboxes.end)

    async def snapshot(self, live: Live) -> tuple[str, int, tuple[str, ...]]:
        """Store a sandbox's state as a snapshot; return (snapshot id, bytes, kinds of state that it does not hold).

        If the caller is cancelled, the snapshot is removed, since no client knows its id.
        """
        return await self.handed_over(self._snapshot(live), lambda made: self._sandboxes.snapshots.delete(made[0]))

    async def restore(self, identity: str, limits: pb.Limits) -> Live:
        """Start a new sandbox from a snapshot. Non-zero limits replace the snapshot's."""
        return await self.handed_over(self._restore(identity, limits), self._sandboxes.end)

    async def handed_over(self, making: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, object]]) -> T:
        """Await `making`. If the caller is cancelled, undo the result once it is there, since no client knows of it."""

        def undone(task: asyncio.Task[T]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._sandboxes.background(undo(task.result()))

        task = self._sandboxes.background(making)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(undone)
            raise

    async def _pause(self, live: Live) -> None:
        async with live.change():
            if live.state == "running":
                require(live, "pause")
                await self.freeze(live)
                live.state = "paused"

    async def _resume(self, live: Live) -> None:
        async with live.change():
            if live.state == "paused":
                await self.thaw(live)
            elif live.state == "hibernated":
                assert live.stored is not None
                live.spec = replace(live.spec, name=self._sandboxes.fresh_name())
                live.box = await live.backend.restore(live.stored, live.spec)
                self._sandboxes.listen(live)
                stored, live.stored = live.stored, None
                await remove_tree(stored)
            live.state = "running"

    async def _hibernate(self, live: Live) -> None:
        async with live.change(quiet=True):
            if live.state == "hibernated":
                return
            into = self._sandboxes.snapshots.hold()
            try:
                lost = await self.save(live, into)
            except BaseException:
                await remove_tree(into)
                raise
            box, live.box = live.box, None
            live.state, live.stored, live.lost = "hibernated", into, lost
            assert box is not None
            with suppress(EnvdError, OSError):
                live.spent_s += (await box.usage()).cpu_s
            await self._sandboxes.destroy(live, box)

    async def _fork(self, live: Live) -> Live:
        require(live, "fork")
        into = self._sandboxes.snapshots.hold()
        try:
            async with live.change(quiet=True):
                await self.save(live, into)
            return await self._sandboxes.restore(wanted_of(live), into, host_name=fresh_host_name())
        finally:
            await remove_tree(into)

    async def _snapshot(self, live: Live) -> tuple[str, int, tuple[str, ...]]:
        lost: tuple[str, ...] = ()

        async def write(into: Path) -> None:
            nonlocal lost
            lost = await self.save(live, into)

        async with live.change(quiet=True):
            header = await self.header_of(live)
            identity, size = await self._sandboxes.snapshots.keep(header, write)
        return identity, size, lost

    async def _restore(self, identity: str, limits: pb.Limits) -> Live:
        header, state = self._sandboxes.snapshots.find(identity)
        wanted = Wanted.of(header).with_limits(limits)
        await self._sandboxes.templates.put(header.template_files)  # a restarted server has no templates
        return await self._sandboxes.restore(wanted, state, host_name=fresh_host_name())

    async def header_of(self, live: Live) -> operations_pb.ReceiveHeader:
        """Everything beside its state that another server, or this one later, needs to restore a sandbox."""
        files = await asyncio.to_thread(self._sandboxes.templates.files_of, live.spec.template)
        return operations_pb.ReceiveHeader(
            backend=live.backend.name,
            template=live.spec.template,
            template_files=files,
            limits=limits_message(live.spec.limits),
            env=live.spec.env,
            labels=live.labels,
            policy_yaml=live.rules_yaml,
            runtime=live.spec.runtime_digest,
            toolset=live.toolset,
        )

    async def save(self, live: Live, into: Path) -> tuple[str, ...]:
        """Write a sandbox's state below `into`, within a quiet `live.change`; return the kinds of state not saved."""
        require(live, "snapshot")
        if live.stored is not None:
            await link_tree(live.stored, into)
            return live.lost
        assert live.box is not None
        if live.state != "paused":
            return await live.box.snapshot(into)
        await live.box.resume()
        try:
            return await live.box.snapshot(into)
        finally:
            await live.box.pause()

    async def freeze(self, live: Live) -> bool:
        """Freeze the processes, within a `live.change`. False if they are frozen already or the backend can't pause."""
        if live.box is None or live.state == "paused" or "pause" not in live.backend.features.can:
            return False
        live.box.guest.hold()
        try:
            await live.box.pause()
        except BaseException:
            live.box.guest.release()
            raise
        return True

    async def thaw(self, live: Live) -> None:
        """Undo `freeze`."""
        assert live.box is not None
        await live.box.resume()
        live.box.guest.release()


def require(live: Live, feature: str) -> None:
    """Raise Unsupported if the sandbox's backend does not offer a feature."""
    can = live.backend.features.offered
    if feature not in can:
        words = ", ".join(sorted(can)) or "none of them"
        raise Unsupported(
            f"the {live.backend.name} backend can't {feature} (it can: {words}): choose another at Create"
        )


def wanted_of(live: Live) -> Wanted:
    """Create request for a copy of a sandbox."""
    spec = live.spec
    return Wanted(
        *(spec.template, asdict(spec.limits), spec.env, live.labels, live.backend.name, live.rules_yaml),
        runtime=spec.runtime_digest,
        toolset=live.toolset,
    )


def fresh_host_name() -> str:
    """Return a random host name for a copy; sandboxes that were created are all called `sandbox`."""
    return f"sandbox-{secrets.token_hex(4)}"
