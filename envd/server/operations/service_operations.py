"""The Operations service: batches, state changes of sandboxes, moves between servers, audit events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from contracts.errors import describe
from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.pb import envd_pb2 as episode_pb
from envd.backends.base import Backend, IsolationLevel
from envd.errors import EnvdError, SandboxGone
from envd.server.admission import Wanted
from envd.server.audit import Event
from envd.server.calls import Context, Service, code_of, streaming, unary
from envd.server.operations.migration import Migration
from envd.server.operations.states import States
from envd.server.sandboxes import Sandboxes
from envd.server.service_sandboxes import created, diff_of, state_of
from envd.tools import toolset_named

VERSION = "2"
MAX_BATCH = 1000
_STATES_A_TURN = 32
_AT_ONCE = 8
"""Maximum number of concurrent creations of one batch, so that other calls are served meanwhile."""


class OperationsService(Service, rpc.OperationsServicer):
    """Servicer for operators of a server and its sandboxes."""

    def __init__(self, sandboxes: Sandboxes, migration: Migration, states: States) -> None:
        super().__init__(sandboxes)
        self._states, self._migration = states, migration

    @unary
    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoReply:
        """Version, backends and number of sandboxes of this server."""
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
    async def Schemas(self, request: pb.SchemasRequest, context: Context) -> pb.SchemasReply:
        """JSON schemas of a toolset's tools, in the form that chat templates take."""
        tools = toolset_named(request.toolset).tools.values()
        return pb.SchemasReply(tools_json=json.dumps([spec.json_schema() for spec in tools]))

    @unary
    async def CreateBatch(self, request: pb.CreateBatchRequest, context: Context) -> pb.CreateBatchReply:
        """Start several sandboxes. A failed creation does not affect the others."""
        if len(request.requests) > MAX_BATCH:
            raise EnvdError(f"a batch creates at most {MAX_BATCH} sandboxes, not {len(request.requests)}: send several")
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(each: episode_pb.CreateRequest) -> pb.CreateResult:
            async with slots:
                try:
                    return pb.CreateResult(created=created(await self.sandboxes.create(Wanted.of(each))))
                except (EnvdError, OSError) as error:
                    words = f"the server failed: {describe(error)}" if isinstance(error, OSError) else str(error)
                    return pb.CreateResult(error=words, code=code_of(error).value[0])

        tasks = [self.sandboxes.background(one(each)) for each in request.requests]
        try:
            return pb.CreateBatchReply(results=await asyncio.gather(*map(asyncio.shield, tasks)))
        except BaseException:
            self.sandboxes.background(self._unwanted(tasks))
            raise

    @unary
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:
        """List the states of all sandboxes, or of those with the given labels."""
        found = self.sandboxes.all(request.labels)
        states: list[episode_pb.SandboxState] = []
        for at in range(0, len(found), _STATES_A_TURN):
            states += await asyncio.gather(*map(state_of, found[at : at + _STATES_A_TURN]))
        return pb.ListReply(sandboxes=states)

    @unary
    async def Pause(self, request: pb.PauseRequest, context: Context) -> episode_pb.SandboxState:
        """Pause a sandbox: freeze its processes."""
        live = self.live(request, context)
        await self._states.pause(live)
        return await state_of(live)

    @unary
    async def Resume(self, request: pb.ResumeRequest, context: Context) -> episode_pb.SandboxState:
        """Resume a paused or hibernated sandbox."""
        live = self.live(request, context)
        await self._states.resume(live)
        return await state_of(live)

    @unary
    async def Hibernate(self, request: pb.HibernateRequest, context: Context) -> episode_pb.SandboxState:
        """Hibernate a sandbox: store its state on disk and end its processes."""
        live = self.live(request, context)
        await self._states.hibernate(live)
        return await state_of(live)

    @unary
    async def Fork(self, request: pb.ForkRequest, context: Context) -> episode_pb.CreateReply:
        """Start an independent copy of a sandbox."""
        return created(await self._states.fork(self.live(request, context)))

    @unary
    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotReply:
        """Store a sandbox's state as a snapshot."""
        identity, size, lost = await self._states.snapshot(self.live(request, context))
        return pb.SnapshotReply(snapshot_id=identity, bytes=size, lost=lost)

    @unary
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> episode_pb.CreateReply:
        """Start a sandbox from a snapshot."""
        return created(await self._states.restore(request.snapshot_id, request.limits))

    @unary
    async def DeleteSnapshot(self, request: pb.DeleteSnapshotRequest, context: Context) -> pb.DeleteSnapshotReply:
        """Remove a snapshot. Idempotent."""
        await self.sandboxes.snapshots.delete(request.snapshot_id)
        return pb.DeleteSnapshotReply()

    @unary
    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateReply:
        """Move a sandbox to another server."""
        moved = await self._migration.send(self.live(request, context), request.target, request.target_key)
        return pb.MigrateReply(bytes=moved.bytes, seconds=moved.seconds, lost=moved.lost)

    @unary
    async def Receive(self, request: AsyncIterator[pb.SnapshotChunk], context: Context) -> pb.ReceiveReply:
        """Receive a sandbox from another server and start it."""
        return pb.ReceiveReply(lost=(await self._migration.receive(request)).lost)

    @unary
    async def Diff(self, request: pb.DiffRequest, context: Context) -> pb.DiffReply:
        """Diff of a sandbox's workspace against its template."""
        return pb.DiffReply(**await diff_of(self.sandboxes, self.live(request, context), request))

    @unary
    async def DeleteBatch(self, request: pb.DeleteBatchRequest, context: Context) -> pb.DeleteBatchReply:
        """End several sandboxes, ignoring those that have ended already."""
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
        """Stream audit events, of all sandboxes or of one, also after its end."""
        log = self.sandboxes.audit
        if not request.follow:
            for event in log.since(request.after, request.sandbox_id):
                yield _event(event)
            return
        async for event in log.follow(request.after, request.sandbox_id):
            yield _event(event)

    async def _unwanted(self, tasks: list[asyncio.Task[pb.CreateResult]]) -> None:
        """End the sandboxes of a batch that was cancelled or failed, once their creations have ended."""
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, pb.CreateResult) and result.HasField("created"):
                with suppress(EnvdError):  # it ended meanwhile, or its end fails
                    await self.sandboxes.end(self.sandboxes.find(result.created.sandbox_id, result.created.token))


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


def _event(event: Event) -> pb.AuditEvent:
    return pb.AuditEvent(
        number=event.number,
        unix_time=event.unix_time,
        sandbox_id=event.sandbox_id,
        kind=event.kind,
        detail_json=event.detail_json,
    )
