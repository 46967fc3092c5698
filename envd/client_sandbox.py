"""One sandbox from a client's side: tool calls, files, processes, and the changes of its state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from contracts.pb import envd_pb2 as pb
from envd import calling
from envd.connection import SANDBOX_TOKEN
from envd.messages import export_message, left_out_of, status_of, tool_result_of
from envd.sandbox_files import SandboxFiles
from envd.sandbox_processes import SandboxProcesses
from envd.types import Export, Handle, LeftOut, SandboxStatus, ToolCall, ToolResult

if TYPE_CHECKING:
    from envd.client import SandboxClient

MOVE_S = 600.0
"""How long a change of state may take: memory is written, sent and read."""


class Sandbox:
    """One live sandbox of a `SandboxClient`. Leaving its `async with` block closes it."""

    def __init__(self, client: SandboxClient, handle: Handle) -> None:
        self.id = handle.id
        self.handle = handle
        """Attach to it again with `client.attach(handle)`."""
        self.left_out = LeftOut()
        """What the export of the last `diff` or `finish` left out."""
        self._client = client
        self._metadata = ((SANDBOX_TOKEN, handle.token),)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def files(self) -> SandboxFiles:
        """Its files, as a program would use them."""
        return SandboxFiles(self._client.caller, self._client.files, self.id, self._metadata)

    @property
    def processes(self) -> SandboxProcesses:
        """Programs in it."""
        return SandboxProcesses(self._client.caller, self._client.processes, self.id, self._metadata)

    async def call(self, call: ToolCall, *, timeout_s: float = 10) -> ToolResult:
        """Run one tool call. A tool that fails answers `ok=False`; an exception means the sandbox itself failed."""
        return (await self.batch([call], timeout_s=timeout_s))[0]

    async def batch(
        self, calls: Sequence[ToolCall], *, timeout_s: float = 10, idempotency_key: str | None = None
    ) -> list[ToolResult]:
        """Run the calls of one turn and answer in request order; adjacent `exec` calls run at the same time, and so do
        those that only look. idempotency_key: a retry with the same one gets the first try's answers.
        """
        request = pb.BatchRequest(
            sandbox_id=self.id,
            calls=[
                pb.ToolCall(name=call.name, arguments_json=json.dumps(_flat(call.arguments), sort_keys=True))
                for call in calls
            ],
            timeout_s=timeout_s,
        )
        deadline_s = timeout_s * max(1, len(calls)) + calling.RPC_GRACE_S
        reply = await self._ask(self._client.tools.Batch, request, deadline_s, idempotency_key)
        return [tool_result_of(each) for each in reply.results]

    async def diff(self, *, export: Export | None = None) -> bytes:
        """The workspace against its template: git format, binary-safe, the same bytes for the same state.

        export: what of it may leave the sandbox (None: everything); `left_out` tells the rest.
        """
        request = pb.DiffRequest(sandbox_id=self.id, export=export_message(export))
        return self._diff_of(await self._ask(self._client.sandboxes.Diff, request))

    async def finish(self, *, export: Export | None = None) -> bytes:
        """Return the diff, as `diff` does, and destroy the sandbox, in one round trip."""
        request = pb.DeleteRequest(sandbox_id=self.id, want_diff=True, export=export_message(export))
        return self._diff_of(await self._ask(self._client.sandboxes.Delete, request))

    def _diff_of(self, reply: Any) -> bytes:
        self.left_out = left_out_of(reply)
        return cast(bytes, reply.diff)

    async def close(self) -> None:
        """Destroy the sandbox. Closing it twice is harmless."""
        await self._ask(self._client.sandboxes.Delete, pb.DeleteRequest(sandbox_id=self.id))

    async def status(self) -> SandboxStatus:
        """What it is and uses now."""
        return status_of(await self._ask(self._client.sandboxes.Get, pb.GetRequest(sandbox_id=self.id)))

    async def pause(self) -> SandboxStatus:
        """Stop every process where it stands. Idempotent."""
        request = pb.PauseRequest(sandbox_id=self.id)
        return status_of(await self._ask(self._client.sandboxes.Pause, request, MOVE_S))

    async def resume(self) -> SandboxStatus:
        """Go on after a pause or a hibernation. Idempotent."""
        request = pb.ResumeRequest(sandbox_id=self.id)
        return status_of(await self._ask(self._client.sandboxes.Resume, request, MOVE_S))

    async def hibernate(self) -> SandboxStatus:
        """Its state to the server's disk; what is `lost` by it the status says. Idempotent."""
        request = pb.HibernateRequest(sandbox_id=self.id)
        return status_of(await self._ask(self._client.sandboxes.Hibernate, request, MOVE_S))

    async def fork(self) -> Sandbox:
        """An independent copy, with fresh entropy and a fresh host name; this one runs on."""
        reply = await self._ask(self._client.sandboxes.Fork, pb.ForkRequest(sandbox_id=self.id), MOVE_S)
        return self._client.attach(Handle(reply.sandbox_id, reply.token))

    async def snapshot(self) -> tuple[str, tuple[str, ...]]:
        """Keep its state: (id for `SandboxClient.restore`, what it does not hold). It runs on."""
        reply = await self._ask(self._client.sandboxes.Snapshot, pb.SnapshotRequest(sandbox_id=self.id), MOVE_S)
        return reply.snapshot_id, tuple(reply.lost)

    async def migrate(self, target: SandboxClient, *, address: str = "", key: str = "") -> Sandbox:
        """Move it to another server, where it goes on under the same id and token.

        Raises MigrationError; it goes on here then.

        address, key: how this sandbox's server reaches the other one, where that is not as we do.
        """
        request = pb.MigrateRequest(sandbox_id=self.id, target=address or target.address, target_key=key)
        await self._ask(self._client.sandboxes.Migrate, request, MOVE_S)
        return target.attach(self.handle)

    async def _ask(self, method: Any, request: Any, timeout_s: float | None = None, key: str | None = None) -> Any:
        deadline_s = calling.RPC_GRACE_S if timeout_s is None else timeout_s
        return await self._client.caller.ask(method, request, deadline_s, self._metadata, key)


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they are sent.

    No tool takes lists or objects, so one is as wrong empty as nested beyond what JSON readers bear.
    """
    return {key: [] if isinstance(value, (list, dict)) else value for key, value in arguments.items()}
