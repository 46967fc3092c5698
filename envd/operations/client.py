"""Client of an envd server with all that it offers: `SandboxClient` and what operates a server.

async with OperationsClient(address) as client:
    for each in await client.list({"team": "search"}):
        print(each.id, each.state)
    sandbox = await client.create(template)
    await sandbox.files.write("notes.txt", b"...")
    await sandbox.hibernate()
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

import grpc

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from envd.calling import error_of
from envd.client import Sandbox, SandboxClient, create_request
from envd.errors import EnvdError
from envd.messages import export_message, limits_message, status_of
from envd.operations.files import SandboxFiles
from envd.operations.processes import SandboxProcesses
from envd.types import Export, Handle, Limits, SandboxStatus

MOVE_S = 600.0
"""How long a change of state may take: memory is written, sent and read."""
_ANSWER_S = 5.0


class OperationsClient(SandboxClient):
    """A `SandboxClient` that also operates its server; its sandboxes are `ManagedSandbox`es."""

    def _open(self, channel: grpc.aio.Channel) -> None:
        super()._open(channel)
        self.operations = rpc.OperationsStub(channel)  # type: ignore[no-untyped-call]
        self.files = rpc.FilesStub(channel)  # type: ignore[no-untyped-call]
        self.processes = rpc.ProcessesStub(channel)  # type: ignore[no-untyped-call]

    def attach(self, handle: Handle) -> ManagedSandbox:
        """See SandboxClient.attach."""
        return ManagedSandbox(self, handle)

    async def create(self, template: str, **options: Any) -> ManagedSandbox:
        """See SandboxClient.create."""
        return cast(ManagedSandbox, await super().create(template, **options))

    async def info(self) -> pb.InfoReply:
        """What the server is: its backends, whether they isolate, how many sandboxes live."""
        return cast(pb.InfoReply, await self.ask("operations.Info", pb.InfoRequest()))

    async def reached(self) -> pb.InfoReply:
        """`info`, for a command: raises EnvdError if no server answers within 5 s."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self.info()
        except TimeoutError:
            raise EnvdError(
                f"no server answers at {self.address}: start one with `python -m envd serve --listen {self.address}`"
            ) from None

    async def create_many(
        self, template: str, count: int, *, idempotency_key: str | None = None, **options: Any
    ) -> list[ManagedSandbox | EnvdError]:
        """Start several, in one round trip, each as `create` does.

        One that could not be started is its error in the list.
        """
        request = create_request(template, **{**options, "backend": options.get("backend") or self.backend})
        batch = pb.CreateBatchRequest(requests=[request] * count)
        reply = await self.ask("operations.CreateBatch", batch, MOVE_S, idempotency_key)
        return [
            (
                self.attach(Handle(each.created.sandbox_id, each.created.token))
                if each.HasField("created")
                else error_of(each.code, each.error)
            )
            for each in reply.results
        ]

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxStatus]:
        """All sandboxes of the server, or those that carry all of these labels."""
        reply = await self.ask("operations.List", pb.ListRequest(labels=dict(labels or {})))
        return [status_of(each) for each in reply.sandboxes]

    async def restore(self, snapshot_id: str, *, limits: Limits | None = None) -> ManagedSandbox:
        """A new sandbox from a snapshot. limits: in place of the snapshot's."""
        request = pb.RestoreRequest(snapshot_id=snapshot_id, limits=None if limits is None else limits_message(limits))
        return cast(ManagedSandbox, await self._wanted(self.ask("operations.Restore", request, MOVE_S)))

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot. Idempotent."""
        await self.ask("operations.DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=snapshot_id))

    async def audit(
        self, *, sandbox_id: str = "", after: int = 0, follow: bool = False
    ) -> AsyncGenerator[pb.AuditEvent, None]:
        """Audit events with numbers above `after`; with `follow` also those to come, without end."""
        request = pb.AuditRequest(sandbox_id=sandbox_id, after=after, follow=follow)
        async with aclosing(self.caller.stream(self.operations.Audit, request)) as events:
            async for event in events:
                yield event


class ManagedSandbox(Sandbox):
    """One live sandbox of an `OperationsClient`."""

    _client: OperationsClient

    def __init__(self, client: OperationsClient, handle: Handle) -> None:
        super().__init__(client, handle)

    @property
    def files(self) -> SandboxFiles:
        """Its files, as a program would use them."""
        return SandboxFiles(self._client.caller, self._client.files, self.id, self._metadata)

    @property
    def processes(self) -> SandboxProcesses:
        """Programs in it."""
        return SandboxProcesses(self._client.caller, self._client.processes, self.id, self._metadata)

    async def diff(self, *, export: Export | None = None) -> bytes:
        """The workspace against its template: git format, binary-safe, the same bytes for the same state.

        export: what of it may leave the sandbox (None: everything); `left_out` tells the rest.
        """
        request = pb.DiffRequest(sandbox_id=self.id, export=export_message(export))
        return self._diff_of(await self._ask("operations.Diff", request))

    async def pause(self) -> SandboxStatus:
        """Stop every process where it stands. Idempotent."""
        request = pb.PauseRequest(sandbox_id=self.id)
        return status_of(await self._ask("operations.Pause", request, MOVE_S))

    async def resume(self) -> SandboxStatus:
        """Go on after a pause or a hibernation. Idempotent."""
        request = pb.ResumeRequest(sandbox_id=self.id)
        return status_of(await self._ask("operations.Resume", request, MOVE_S))

    async def hibernate(self) -> SandboxStatus:
        """Its state to the server's disk; what is `lost` by it the status says. Idempotent."""
        request = pb.HibernateRequest(sandbox_id=self.id)
        return status_of(await self._ask("operations.Hibernate", request, MOVE_S))

    async def fork(self) -> ManagedSandbox:
        """An independent copy, with fresh entropy and a fresh host name; this one runs on."""
        reply = await self._ask("operations.Fork", pb.ForkRequest(sandbox_id=self.id), MOVE_S)
        return self._client.attach(Handle(reply.sandbox_id, reply.token))

    async def snapshot(self) -> tuple[str, tuple[str, ...]]:
        """Keep its state: (id for `SandboxClient.restore`, what it does not hold). It runs on."""
        reply = await self._ask("operations.Snapshot", pb.SnapshotRequest(sandbox_id=self.id), MOVE_S)
        return reply.snapshot_id, tuple(reply.lost)

    async def migrate(self, target: OperationsClient, *, address: str = "", key: str = "") -> ManagedSandbox:
        """Move it to another server, where it goes on under the same id and token.

        Raises MigrationError; it goes on here then.

        address, key: how this sandbox's server reaches the other one, where that is not as we do.
        """
        request = pb.MigrateRequest(sandbox_id=self.id, target=address or target.address, target_key=key)
        await self._ask("operations.Migrate", request, MOVE_S)
        return target.attach(self.handle)
