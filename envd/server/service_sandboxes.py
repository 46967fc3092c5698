"""The Sandboxes service: store templates; create, inspect and delete sandboxes."""

from __future__ import annotations

import time
from typing import Any

from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.backends.base import Usage
from envd.errors import EnvdError, SandboxGone, TemplateError
from envd.server.admission import Wanted
from envd.server.calls import Context, Service, unary
from envd.server.exporting import Exporting
from envd.server.guestdiff import guest_diff
from envd.server.live import Live
from envd.server.sandboxes import Sandboxes


class SandboxesService(Service, rpc.SandboxesServicer):
    """Servicer for all calls of an episode on sandboxes except tool calls."""

    @unary
    async def PutTemplate(self, request: pb.PutTemplateRequest, context: Context) -> pb.PutTemplateReply:
        """Store a template, whole or as a patch of its base, and return its digest."""
        templates = self.sandboxes.templates
        if request.base:
            return pb.PutTemplateReply(digest=await templates.derive(request.base, request.files, request.removed))
        if request.removed:
            raise TemplateError("removed paths without a base: name the digest of the template that has them")
        return pb.PutTemplateReply(digest=await templates.put(request.files))

    @unary
    async def PutRuntime(self, request: pb.PutRuntimeRequest, context: Context) -> pb.PutRuntimeReply:
        """Take a piece of a runtime's tar."""
        about = (request.digest, request.size, request.offset, request.data)
        # finished: a piece must not be taken halfway when its caller leaves
        return pb.PutRuntimeReply(received=await self.sandboxes.finished(self.sandboxes.runtimes.put(*about)))

    @unary
    async def Create(self, request: pb.CreateRequest, context: Context) -> pb.CreateReply:
        """Start a sandbox."""
        return created(await self.sandboxes.create(Wanted.of(request)))

    @unary
    async def Get(self, request: pb.GetRequest, context: Context) -> pb.SandboxState:
        """State and usage of a sandbox."""
        return await state_of(self.live(request, context))

    @unary
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteReply:
        """End a sandbox, and return its diff if the request wants it. Idempotent without a diff."""
        try:
            live = self.live(request, context)
        except SandboxGone:
            if request.want_diff:
                raise
            return pb.DeleteReply()
        diff = await diff_of(self.sandboxes, live, request) if request.want_diff else {}
        await self.sandboxes.end(live)
        if request.want_diff and live.requests is not None:
            diff["requests_json"] = live.requests.to_json()  # it makes no more of them now
        return pb.DeleteReply(**diff)


def created(live: Live) -> pb.CreateReply:
    """Reply with the id and token of a new sandbox."""
    return pb.CreateReply(sandbox_id=live.identity, token=live.token)


async def state_of(live: Live) -> pb.SandboxState:
    """State and usage of a sandbox; the usage is 0 if it can't be read."""
    usage, now = Usage(), time.monotonic()
    if live.box is not None:
        try:
            usage = await live.box.usage()
        except (EnvdError, OSError):
            pass  # the sandbox is ending
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


async def diff_of(sandboxes: Sandboxes, live: Live, request: Any) -> dict[str, Any]:
    """Fields of the reply to a DeleteRequest or a DiffRequest."""
    export = Exporting(request.export) if request.HasField("export") else None
    async with live.using() as guest:
        diff = await guest_diff(guest, live.spec.template_dir, export=export)
    if export is None:
        return {"diff": diff}
    export.record(sandboxes.audit, live.identity)
    told = [pb.LeftOut(path=path, reason=reason) for path, reason in export.left_out.paths]
    return {"diff": diff, "left_out": told, "left_out_counts": export.left_out.counts}
