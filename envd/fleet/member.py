"""One server of a list: its load, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from contracts.pb import envd_operations_pb2 as pb
from contracts.retries import backoff_s
from envd.connection import Access, Metadata
from envd.errors import EnvdError, ServerDraining, ServerLost, ServerUnavailable
from envd.fleet.moving import MovableSandbox
from envd.operations.client import OperationsClient
from envd.types import Handle

PROBE_S = 3.0
"""Longest wait for a health check."""
_FIRST_OUT_S, _LONGEST_OUT_S = 1.0, 30.0
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
"""So that calls on a machine that vanished without a word fail within 30 s. Servers allow a ping every 10 s."""
_CREATE, _DELETE = "sandboxes.Create", "sandboxes.Delete"
_log = logging.getLogger(__name__)


class Member(OperationsClient):
    """A client of one server that raises ServerLost where the connection broke or the server does not answer at all."""

    def __init__(self, address: str, on_drain: Callable[[Member], None], backend: str = "") -> None:
        """on_drain: called each time the server turns out to drain. backend: see SandboxClient."""
        super().__init__(address, Access.found(address, KEEPALIVE), backend)
        self._on_drain = on_drain
        self.listed = True
        """Whether the list still names it."""
        self.met = False
        """Whether it serves, by its last answer."""
        self.fault = ""
        """Why it is left out."""
        self.templates: set[str] = set()
        """Digests of the templates and runtimes that it has been given."""
        self._open_ids: set[str] = set()
        self._sandboxes: WeakValueDictionary[str, MovableSandbox] = WeakValueDictionary()
        self._pending = 0
        self._failures, self._out_until = 0, 0.0
        self._probing: asyncio.Task[bool] | None = None

    def _open(self, channel: grpc.aio.Channel) -> None:
        super()._open(channel)
        self._health = health_pb2_grpc.HealthStub(channel)

    def attach(self, handle: Handle) -> MovableSandbox:
        """See SandboxClient.attach."""
        sandbox = MovableSandbox(self, handle)
        self._sandboxes[handle.id] = sandbox
        return sandbox

    def adopted(self, handle: Handle) -> MovableSandbox:
        """A sandbox that an earlier client created on this server, counted as one of this client."""
        self._open_ids.add(handle.id)
        return self.attach(handle)

    @property
    def load(self) -> int:
        """Sandboxes of this client on the server, with creations and verifications in progress."""
        return len(self._open_ids) + self._pending

    @property
    def is_out(self) -> bool:
        """Whether it is left out at present."""
        return time.monotonic() < self._out_until

    def has(self, sandbox_id: str) -> bool:
        """Whether a sandbox of this client lives there."""
        return sandbox_id in self._open_ids

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count one creation or verification for the duration of the block."""
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1

    async def serves(self) -> bool:
        """Whether it serves: by its last answer, else by a health check, which concurrent callers share."""
        return self.met or await self._probed()

    async def provide(
        self,
        digest: str,
        files: tuple[Mapping[str, bytes], Mapping[str, bytes] | None] | None,
        runtime: str = "",
        archive: Path | None = None,
    ) -> None:
        """Give it a template and a runtime that it does not have yet. None: what the client was not given.

        files: of the template, and of its base if it has one.
        """
        if runtime not in self.templates and archive is not None:
            await self.put_runtime(runtime, archive)
            self.templates.add(runtime)
        if digest not in self.templates and files is not None:
            await self.put_template(*files)
            self.templates.add(digest)

    async def ask(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = None,
        key: str | None = None,
        metadata: Metadata = (),
    ) -> Any:
        """See SandboxClient.ask. Raises ServerLost also."""
        try:
            reply = await super().ask(method, request, timeout_s, key, metadata)
        except ServerDraining as error:
            self._drains(str(error))
            raise
        except ServerUnavailable as error:
            if not await self._probed() or isinstance(error, ServerLost):
                raise ServerLost(f"lost the envd server {self.address}: {error}") from error
            raise
        finally:
            if method == _DELETE:
                self._open_ids.discard(request.sandbox_id)
        if method == _CREATE:
            self._open_ids.add(reply.sandbox_id)
        return reply

    def leave_out(self, fault: str) -> None:
        """Leave it out for a while, longer after each failure in a row."""
        if self.met or not self._failures:
            _log.warning("envd server %s is left out: %s", self.address, fault)
        self._failures += 1
        self.fault, self.met = fault, False
        self._out_until = time.monotonic() + backoff_s(self._failures, _FIRST_OUT_S, _LONGEST_OUT_S)
        self.templates.clear()  # a server that comes back may have been restarted

    async def movable(self) -> list[MovableSandbox]:
        """Sandboxes of this client that can go on elsewhere with their processes."""
        able = {each.name for each in (await self.info()).backends if can_move(each)}
        found = []
        for sandbox in [self._sandboxes[each] for each in self._open_ids if each in self._sandboxes]:
            try:
                if able and (await sandbox.status()).backend in able:
                    found.append(sandbox)
            except EnvdError:
                continue  # it ended meanwhile
        return found

    def handed_over(self, sandbox: MovableSandbox, target: Member) -> None:
        """Count a sandbox on the server that it was moved to."""
        self._open_ids.discard(sandbox.id)
        target._open_ids.add(sandbox.id)
        target._sandboxes[sandbox.id] = sandbox

    def _drains(self, fault: str) -> None:
        self.leave_out(fault)
        self._on_drain(self)

    async def look(self) -> None:
        """Find out again whether it serves."""
        await self._probed()

    async def _probed(self) -> bool:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        try:
            reply = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            self.leave_out(f"it does not answer ({error.details() or error.code().name})")
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # else it may only be slow: its sandboxes live on
                self._open_ids.clear()
            return False
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            self._drains("it is draining or still starting")
            return False
        if self._failures:
            _log.warning("envd server %s serves again", self.address)
        self.caller.expect_answers()
        self.met, self._failures, self._out_until = True, 0, 0.0
        return True


def can_move(backend: pb.BackendInfo) -> bool:
    """Whether a backend moves sandboxes with their processes. Without those a sandbox is not what its agent left."""
    return backend.keeps_processes and "migrate" in backend.features
