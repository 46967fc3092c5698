"""The Sandboxes service: templates, and the life of sandboxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.backends.base import Backend, IsolationLevel, Usage
from envd.errors import EnvdError, SandboxGone
from envd.server.admission import Wanted
from envd.server.audit import Event
from envd.server.calls import Context, Service, code_of, streaming, unary
from envd.server.exporting import Exporting
from envd.server.guestdiff import guest_diff
from envd.server.live import Live
from envd.server.migration import Migration
from envd.server.sandboxes import Sandboxes
from envd.server.states import States

VERSION = "2"
MAX_BATCH = 1000
_STATES_A_TURN = 32
_AT_ONCE = 8
"""Creations of one batch that run at the same time; others' calls go between them."""


class SandboxesService(Service, rpc.SandboxesServicer):
    """Templates and the life of sandboxes."""

    def __init__(self, sandboxes: Sandboxes, migration: Migration, states: States) -> None:
        super().__init__(sandboxes)
        self._states, self._migration = states, migration

    @unary
    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoReply:
        """What the server is."""
        backends = list(self.sandboxes.backends.values())
        first = backends[0]
        return pb.InfoReply(
            backend=first.name,
            isolation=first.features.isolation > IsolationLevel.NONE,
            version=VERSION,
            live=len(self.sandboxes),
            limits_enforced=sorted(first.features.limits_enforced),
            backends=[_backend(each) for each in backends],
        )

    @unary
    async def PutTemplate(self, request: pb.PutTemplateRequest, context: Context) -> pb.PutTemplateReply:
        """Store a template."""
        return pb.PutTemplateReply(digest=await self.sandboxes.templates.put(request.files))

    @unary
    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateReply:
        """Start a sandbox."""
        return _created(await self.sandboxes.create(Wanted.of(request)))

    @unary
    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.CreateBatchReply:
        """Start several; one that fails leaves the others."""
        if len(request.requests) > MAX_BATCH:
            raise EnvdError(f"a batch creates at most {MAX_BATCH} sandboxes, not {len(request.requests)}: send several")
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(each: pb.CreateRequest) -> pb.CreateResult:
            async with slots:
                try:
                    return pb.CreateResult(created=_created(await self.sandboxes.create(Wanted.of(each))))
                except EnvdError as error:
                    return pb.CreateResult(error=str(error), code=code_of(error).value[0])

        tasks = [self.sandboxes.background(one(each)) for each in request.requests]
        try:
            return pb.CreateBatchReply(results=await asyncio.gather(*map(asyncio.shield, tasks)))
        except asyncio.CancelledError:
            self.sandboxes.background(self._unwanted(tasks))
            raise

    @unary
    async def Get(self, request: pb.GetRequest, context: Context) -> pb.SandboxState:
        """One sandbox's state."""
        return await _state(self.live(request, context))

    @unary
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        """All sandboxes' states, or those with some labels."""
        found = self.sandboxes.all(request.labels)
        states: list[pb.SandboxState] = []
        for at in range(0, len(found), _STATES_A_TURN):
            states += await asyncio.gather(*map(_state, found[at : at + _STATES_A_TURN]))
        return pb.ListReply(sandboxes=states)

    @unary
    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.SandboxState:
        """Freeze a sandbox."""
        live = self.live(request, context)
        await self._states.pause(live)
        return await _state(live)

    @unary
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.SandboxState:
        """Let it go on."""
        live = self.live(request, context)
        await self._states.resume(live)
        return await _state(live)

    @unary
    async def Hibernate(self, request: pb.HibernateRequest, context: Context) -> pb.SandboxState:
        """Its state to disk."""
        live = self.live(request, context)
        await self._states.hibernate(live)
        return await _state(live)

    @unary
    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.CreateReply:
        """An independent copy."""
        return _created(await self._states.fork(self.live(request, context)))

    @unary
    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotReply:
        """Keep its state."""
        identity, size, lost = await self._states.snapshot(self.live(request, context))
        return pb.SnapshotReply(snapshot_id=identity, bytes=size, lost=lost)

    @unary
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.CreateReply:
        """A sandbox from a snapshot."""
        return _created(await self._states.restore(request.snapshot_id, request.limits))

    @unary
    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotReply:
        """Remove a snapshot."""
        await self.sandboxes.snapshots.delete(request.snapshot_id)
        return pb.DeleteSnapshotReply()

    @unary
    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateReply:
        """Move a sandbox to another server."""
        moved = await self._migration.send(self.live(request, context), request.target, request.target_key)
        return pb.MigrateReply(bytes=moved.bytes, seconds=moved.seconds, lost=moved.lost)

    @unary
    async def Receive(self, request: AsyncIterator[pb.SnapshotChunk], context: Context) -> pb.ReceiveReply:
        """Take a sandbox over."""
        return pb.ReceiveReply(lost=(await self._migration.receive(request)).lost)

    @unary
    async def Diff(self, request: pb.DiffRequest, context: Context) -> pb.DiffReply:
        """A sandbox's diff."""
        return pb.DiffReply(**await self._diff(self.live(request, context), request))

    @unary
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """End a sandbox."""
        try:
            live = self.live(request, context)
        except SandboxGone:
            if request.want_diff:
                raise
            return pb.DeleteReply()
        diff = await self._diff(live, request) if request.want_diff else {}
        await self.sandboxes.end(live)
        return pb.DeleteReply(**diff)

    @unary
    async def DeleteBatch(self, request: pb.DeleteBatchRequest, context: Context) -> pb.DeleteBatchReply:
        """End several; those that are no more are fine."""
        if len(request.sandbox_ids) != len(request.tokens):
            raise EnvdError(f"{len(request.sandbox_ids)} ids with {len(request.tokens)} tokens: send one token an id")
        for identity, token in zip(request.sandbox_ids, request.tokens, strict=True):
            try:
                live = self.sandboxes.find(identity, token)
            except SandboxGone:
                continue
            await self.sandboxes.end(live)
        return pb.DeleteBatchReply()

    @streaming
    async def Audit(self, request: pb.AuditRequest, context: Context) -> AsyncIterator[pb.AuditEvent]:
        """Audit events; those of one sandbox can also be read after its end."""
        log = self.sandboxes.audit
        if not request.follow:
            for event in log.since(request.after, request.sandbox_id):
                yield _event(event)
            return
        async for event in log.follow(request.after, request.sandbox_id):
            yield _event(event)

    async def _diff(self, live: Live, request: pb.DiffRequest | pb.DeleteRequest) -> dict[str, Any]:
        """A reply's fields."""
        export = Exporting(request.export) if request.HasField("export") else None
        async with live.using() as guest:
            diff = await guest_diff(guest, live.spec.template_dir, export=export)
        if export is None:
            return {"diff": diff}
        export.record(self.sandboxes.audit, live.identity)
        told = [pb.LeftOut(path=path, reason=reason) for path, reason in export.left_out.paths]
        return {"diff": diff, "left_out": told, "left_out_counts": export.left_out.counts}

    async def _unwanted(self, tasks: list[asyncio.Task[pb.CreateResult]]) -> None:
        """The caller of a batch has gone: what it would have been told of is ended."""
        for result in await asyncio.gather(*tasks):
            if result.HasField("created"):
                live = self.sandboxes.find(result.created.sandbox_id, result.created.token)
                await self.sandboxes.end(live)


def _created(live: Live) -> pb.CreateReply:
    return pb.CreateReply(sandbox_id=live.identity, token=live.token)


def _backend(backend: Backend) -> pb.BackendInfo:
    features = backend.features
    return pb.BackendInfo(
        name=backend.name,
        isolation_level=features.isolation.name.lower(),
        limits_enforced=sorted(features.limits_enforced),
        keeps_processes=features.keeps_processes,
        features=sorted(features.offered),
        helper=features.helper,
    )


async def _state(live: Live) -> pb.SandboxState:
    """What a sandbox is and uses now. Where its use can't be told it is 0."""
    usage, now = Usage(), time.monotonic()
    if live.box is not None:
        try:
            usage = await live.box.usage()
        except (EnvdError, OSError):
            pass  # it is just ending
    return pb.SandboxState(
        sandbox_id=live.identity,
        state=live.state,
        backend=live.backend.name,
        template=live.spec.template,
        age_s=now - live.created,
        expires_in_s=max(live.expires - now, 0),
        memory_bytes=usage.memory_bytes,
        pids=usage.pids,
        cpu_s=live.spent_s + usage.cpu_s,
        labels=live.labels,
        host_name=live.spec.host_name,
        lost=live.lost,
    )


def _event(event: Event) -> pb.AuditEvent:
    return pb.AuditEvent(
        number=event.number,
        unix_time=event.unix_time,
        sandbox_id=event.sandbox_id,
        kind=event.kind,
        detail_json=event.detail_json,
    )
