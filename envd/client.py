"""Client of the environment plane, as an episode uses it (grpc.aio).

async with SandboxClient(address) as client:
    template = await client.put_template({"calc.py": b"..."})
    sandbox = await client.create(template)
    result = await sandbox.call(ToolCall("read", {"path": "calc.py"}))
    diff = await sandbox.finish()
    verdict = await client.verify(template, diff, hidden, ["tests/test_hidden.py::test_adds"])

`envd.operations.client` has what operates a server: files, processes, states, moves, audit events.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import grpc

from contracts import tracing
from contracts.pb import envd_pb2 as pb
from contracts.pb import envd_pb2_grpc as rpc
from envd.calling import PYTHON_GRACE_S, RPC_GRACE_S, Caller
from envd.connection import SANDBOX_TOKEN, Access, Metadata
from envd.errors import (
    BaseMissing,
    EnvdError,
    IdempotencyError,
    SandboxGone,
    SandboxUnknown,
    ServerBusy,
    ServerLost,
    ServerUnavailable,
    TemplateError,
)
from envd.meeting import default_address
from envd.messages import export_message, left_out_of, limits_message, status_of, tool_result_of, verify_result_of
from envd.tools.schemas import MAX_NESTING, is_too_deep
from envd.trees import changes, template_digest
from envd.types import (
    Export,
    Handle,
    LeftOut,
    Limits,
    SandboxStatus,
    TestOutcome,
    ToolCall,
    ToolResult,
    VerifyResult,
)

__all__ = [
    "Access",
    "EnvdError",
    "Export",
    "Handle",
    "IdempotencyError",
    "LeftOut",
    "Limits",
    "Sandbox",
    "SandboxClient",
    "SandboxGone",
    "SandboxStatus",
    "SandboxUnknown",
    "ServerLost",
    "ServerUnavailable",
    "TemplateError",
    "TestOutcome",
    "ToolCall",
    "ToolResult",
    "VerifyResult",
]

_log = logging.getLogger(__name__)
_PIECE = 4 << 20
_RUNTIME_S = 900.0
"""Bytes of a runtime in one message, and how long the last one may take: the server compiles the packages then."""
_BASES, _BASE_TRIES = 8, 3
"""Bases of templates whose digests are kept, and how often one is sent for one template."""
_ENDING_S = 10.0
"""Longest that a client's end waits for sandboxes that nobody wants any more."""
_TOO_DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(MAX_NESTING), [])
"""A value nested one level too deeply."""


class SandboxClient:
    """A connection to one envd server.

    `address` is `unix:/path` or `host:port`, by default where this user's server listens by default. Holds no state but
    the channel.

    The first call waits for a server that still starts. Once one has answered, a server that has gone is an error at
    once, and a later call finds one that came back at the same address. access: TLS and the key, where the server asks
    for them; None: the key of $TRIPLANE_ENVD_KEY_FILE, else of this user's own server on that port (`Access.found`).
    backend: of sandboxes and verifications that name none; empty: the server's choice.
    """

    def __init__(self, address: str | None = None, access: Access | None = None, backend: str = "") -> None:
        self.address = default_address() if address is None else address
        self.backend = backend
        self.caller = Caller(self.address, Access.found(self.address) if access is None else access)
        self._ending: set[asyncio.Future[None]] = set()
        self._sending: dict[str, asyncio.Future[Any]] = {}
        self._bases: deque[tuple[Mapping[str, bytes], str]] = deque(maxlen=_BASES)

    async def __aenter__(self) -> Self:
        self._open(self.caller.open())
        return self

    def _open(self, channel: grpc.aio.Channel) -> None:
        self.sandboxes = rpc.SandboxesStub(channel)  # type: ignore[no-untyped-call]
        self.tools = rpc.ToolsStub(channel)  # type: ignore[no-untyped-call]
        self.verifier = rpc.VerifierStub(channel)  # type: ignore[no-untyped-call]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ending:
            await asyncio.wait(self._ending, timeout=_ENDING_S)
        await self.caller.close()

    async def put_template(self, files: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> str:
        """Store the files of a workspace and return their digest. Idempotent.

        The workspace that sandboxes get is a git repository with these files in one commit, the same for ever.

        base: files that many templates share, which must not change while the client is open. The server gets them
        once, and of `files` only what differs. Digest and workspace are those of a template without a base.
        Raises TemplateError for a bad path.
        """
        if base is None:
            return await self._put_whole(files)
        digest = self._digest_of(base)
        changed, removed = changes(base, files)
        request = pb.PutTemplateRequest(files=changed, base=digest, removed=removed)
        for _ in range(_BASE_TRIES):
            with suppress(BaseMissing):
                return cast(str, (await self.ask("sandboxes.PutTemplate", request)).digest)
            await self._shared(digest, lambda: self._put_whole(base))
        _log.warning(
            "envd server %s removed the base of a template %d times, so the template is sent whole: raise"
            " quotas.template_mb or quotas.templates in its rules",
            self.address,
            _BASE_TRIES,
        )
        return await self._put_whole(files)

    async def _put_whole(self, files: Mapping[str, bytes]) -> str:
        return cast(str, (await self.ask("sandboxes.PutTemplate", pb.PutTemplateRequest(files=dict(files)))).digest)

    def _digest_of(self, base: Mapping[str, bytes]) -> str:
        """Template digest of a base, computed once as long as few others are used."""
        found = next((digest for each, digest in self._bases if each is base), None)
        if found is None:
            found = template_digest(base)
            self._bases.append((base, found))
        return found

    async def put_runtime(self, digest: str, archive: Path) -> None:
        """Store a runtime, an uncompressed tar with this SHA-256. Idempotent; can be resumed.

        It holds packages, plain files only; or, if it begins with the directory `.`, a root file system.
        """
        await self._shared(digest, lambda: self._send_runtime(digest, archive))

    async def _shared(self, digest: str, send: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Send what has this digest, or wait for who does so already."""
        sending = self._sending.get(digest)
        if sending is None:
            sending = self._sending[digest] = asyncio.ensure_future(send())
            sending.add_done_callback(lambda _: self._sending.pop(digest, None))
        await asyncio.shield(sending)  # others may wait for it too

    async def _send_runtime(self, digest: str, archive: Path) -> None:
        size, at, data = archive.stat().st_size, 0, b""
        while True:
            request = pb.PutRuntimeRequest(digest=digest, size=size, offset=at, data=data)
            at = (await self.ask("sandboxes.PutRuntime", request, _RUNTIME_S)).received
            if at >= size:
                return
            data = await asyncio.to_thread(_piece, archive, at)

    async def create(
        self,
        template: str,
        *,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        backend: str = "",
        rules: str = "",
        runtime: str = "",
        toolset: str = "",
        record_requests: bool = False,
        idempotency_key: str | None = None,
        timeout_s: float = RPC_GRACE_S,
    ) -> Sandbox:
        """Start a sandbox with its own copy of the template's workspace; it answers calls when this returns.

        limits: None for the server's defaults. backend: empty for this client's. rules: YAML, within the
        server's own. runtime: digest of packages, or a root file system, in place of the server's own, see
        `put_runtime`. toolset: the tools that calls may name (`envd.tools.TOOLSETS`); empty: the default ones.
        record_requests: keep what it asks of its proxy for `Sandbox.requests`; it has no tunnels then.
        idempotency_key: a retry with the same one gets the same sandbox. Cancelled without one, it ends what the server
        still makes. timeout_s: pods that pull their image take minutes.
        """
        backend = backend or self.backend
        request = create_request(template, limits, env, labels, backend, rules, runtime, toolset, record_requests)
        if idempotency_key is not None:  # a retry may want it
            return self._made(await self.ask("sandboxes.Create", request, timeout_s, idempotency_key))
        return await self._wanted(self.ask("sandboxes.Create", request, timeout_s))

    def attach(self, handle: Handle) -> Sandbox:
        """A sandbox that lives already, by the `Sandbox.handle` of whoever created it."""
        return Sandbox(self, handle)

    async def adopt(self, handle: Handle, server: str) -> Sandbox:
        """A sandbox that an earlier client created on the server with this address (`Sandbox.server.address`).

        Raises EnvdError if it is another server than this client's.
        """
        if server != self.address:
            raise EnvdError(f"sandbox {handle.id[:40]} is on the envd server {server}, not on {self.address}")
        return self.attach(handle)

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden_files: Mapping[str, bytes],
        tests: Sequence[str],
        *,
        limits: Limits | None = None,
        timeout_s: float = 10,
        artifacts: Sequence[str] = (),
        product: Sequence[str] = (),
        backend: str = "",
        rules: str = "",
        runtime: str = "",
        plugins: Sequence[str] = (),
        ini: Mapping[str, str] | None = None,
        idle_s: float = 0,
    ) -> VerifyResult:
        """Run the named tests (pytest node ids) on the template with `diff` applied, in a fresh sandbox.

        Hidden files are placed after the diff and win over it. Test configuration that the diff brings is ignored.
        However many verifications the server has before this one, waiting for them is no fault: only its own run has a
        deadline. artifacts: patterns as in `Export`; what else the diff touches does not count, and `tampering` names
        it. product: paths that solutions change; other files of the template that look like helpers of its tests are
        restored. backend, rules: as in `create`; without both, what a sandbox that names none runs on. The result says
        which it was. runtime: as in `create`. plugins, ini: modules that pytest loads as plugins, and its settings.
        idle_s: ends the run as `timed_out` once its processes used no processor time for that long in total; 0: never.
        """
        request = pb.VerifyRequest(
            template=template,
            diff=diff,
            hidden_files=dict(hidden_files),
            tests=tests,
            limits=None if limits is None else limits_message(limits),
            timeout_s=timeout_s,
            artifacts=artifacts,
            product=product,
            backend=backend or self.backend,
            policy_yaml=rules,
            runtime=runtime,
            plugins=plugins,
            ini=dict(ini or {}),
            idle_s=idle_s,
        )
        reply = None
        while reply is None:
            with suppress(ServerBusy):  # it answered, so it works: queue again
                reply = await self.ask("verifier.Verify", request, timeout_s + 4 * RPC_GRACE_S)
        return verify_result_of(reply)

    async def found(self, template: str, findings: Sequence[str]) -> None:
        """Have the server record in its audit log what the grader found by comparing several runs of a template's
        tests.
        """
        request = pb.FoundRequest(template=template, findings=findings)
        await self.ask("verifier.Found", request)

    def _made(self, reply: Any) -> Sandbox:
        return self.attach(Handle(reply.sandbox_id, reply.token))

    async def _wanted(self, asking: Coroutine[Any, Any, Any]) -> Sandbox:
        """The sandbox that a call makes, ended when the caller gives up meanwhile.

        gRPC tells a server nothing of a client that leaves while its reply is on the way, so the call is not cancelled:
        nobody but us would know what came of it.
        """
        asked = asyncio.ensure_future(asking)
        try:
            return self._made(await asyncio.shield(asked))
        except asyncio.CancelledError:
            ending = asyncio.ensure_future(self._unwanted(asked))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise

    async def _unwanted(self, asked: asyncio.Future[Any]) -> None:
        with suppress(EnvdError):
            await self._made(await asked).close()

    async def ask(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = None,
        key: str | None = None,
        metadata: Metadata = (),
    ) -> Any:
        """The reply of a unary method, named `stub.Method`. key: of idempotency. Raises EnvdError."""
        stub, _, name = method.partition(".")
        if not hasattr(self, stub):
            raise EnvdError("SandboxClient is not open: use it as `async with SandboxClient(address) as client`")
        deadline_s = RPC_GRACE_S if timeout_s is None else timeout_s
        with tracing.span(*tracing.grpc_call(f"triplane.envd.v1.{stub.capitalize()}", name), "client") as span:
            try:
                reply = await self.caller.ask(getattr(getattr(self, stub), name), request, deadline_s, metadata, key)
            except EnvdError as error:
                if isinstance(error.__cause__, grpc.aio.AioRpcError):
                    span.set({tracing.GRPC_CODE: error.__cause__.code().name})
                raise
            span.set({tracing.GRPC_CODE: "OK"})
            return reply


class Sandbox:
    """One live sandbox of a `SandboxClient`. Leaving its `async with` block closes it."""

    def __init__(self, client: SandboxClient, handle: Handle) -> None:
        self.id = handle.id
        self.handle = handle
        """Attach to it again with `client.attach(handle)`."""
        self.left_out = LeftOut()
        """What the export of the last diff left out."""
        self.requests = b""
        """After `finish`: the requests that it made, if they were recorded, as JSON (envd/server/egress_record.py)."""
        self._client = client
        self._metadata = ((SANDBOX_TOKEN, handle.token),)

    @property
    def server(self) -> SandboxClient:
        """Client of the server that it lives on: of a list of servers, that one."""
        return self._client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
                pb.ToolCall(name=call.name, arguments_json=json.dumps(_bounded(call.arguments), sort_keys=True))
                for call in calls
            ],
            timeout_s=timeout_s,
        )
        graces_s = PYTHON_GRACE_S * sum(call.name == "python" for call in calls)
        deadline_s = timeout_s * max(1, len(calls)) + graces_s + RPC_GRACE_S
        reply = await self._ask("tools.Batch", request, deadline_s, idempotency_key)
        return [tool_result_of(each) for each in reply.results]

    async def finish(self, *, export: Export | None = None, idempotency_key: str | None = None) -> bytes:
        """Destroy the sandbox and return its workspace against its template.

        Git format, binary-safe, the same bytes for the same state.

        export: what of it may leave the sandbox (None: everything); `left_out` tells the rest. idempotency_key: a retry
        with the same one gets the first try's answer, shortly after the end of the sandbox too.
        """
        request = pb.DeleteRequest(sandbox_id=self.id, want_diff=True, export=export_message(export))
        reply = await self._ask("sandboxes.Delete", request, key=idempotency_key)
        self.requests = reply.requests_json
        return self._diff_of(reply)

    def _diff_of(self, reply: Any) -> bytes:
        self.left_out = left_out_of(reply)
        return cast(bytes, reply.diff)

    async def close(self) -> None:
        """Destroy the sandbox. Closing it twice is harmless."""
        await self._ask("sandboxes.Delete", pb.DeleteRequest(sandbox_id=self.id))

    async def status(self) -> SandboxStatus:
        """What it is and uses now."""
        return status_of(await self._ask("sandboxes.Get", pb.GetRequest(sandbox_id=self.id)))

    async def _ask(self, method: str, request: Any, timeout_s: float | None = None, key: str | None = None) -> Any:
        return await self._client.ask(method, request, timeout_s, key, self._metadata)


def create_request(
    template: str,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    backend: str = "",
    rules: str = "",
    runtime: str = "",
    toolset: str = "",
    record_requests: bool = False,
) -> pb.CreateRequest:
    """A request to create a sandbox, with the arguments of `SandboxClient.create`."""
    return pb.CreateRequest(
        template=template,
        limits=None if limits is None else limits_message(limits),
        env=dict(env or {}),
        labels=dict(labels or {}),
        backend=backend,
        policy_yaml=rules,
        runtime=runtime,
        toolset=toolset,
        record_requests=record_requests,
    )


def _piece(archive: Path, at: int) -> bytes:
    with archive.open("rb") as file:
        file.seek(at)
        return file.read(_PIECE)


def _bounded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they are sent.

    One that is nested beyond what JSON readers bear is replaced by a value that is refused for the same reason.
    """
    return {key: _TOO_DEEP if is_too_deep(value) else value for key, value in arguments.items()}
