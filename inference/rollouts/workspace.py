"""Sandbox of an episode, started at the first tool call."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from contracts.errors import InfraFault, TriplaneError
from contracts.final_states import RequestsState, recording
from contracts.runtimes import runtime_archive
from contracts.store import Store
from contracts.tasks import Task
from envd.client import (
    EnvdError,
    Export,
    Handle,
    IdempotencyError,
    Limits,
    Sandbox,
    SandboxClient,
    SandboxUnknown,
    ServerLost,
    ServerUnavailable,
    TemplateError,
    ToolCall,
    ToolResult,
)
from inference.errors import SandboxBroken

LIFETIME_MARGIN_S = 60.0
CLOSE_TIMEOUT_S = 10.0
_RETURN_S = 5.0
"""Seconds in which a server that can't be reached may come back before the start of a sandbox fails."""
_RETURN_PAUSE_S = 0.2
_log = logging.getLogger(__name__)


class Workspaces:
    """Provides workspaces through one client and stores each task's files and runtime there once."""

    def __init__(
        self, client: SandboxClient, limits: Limits, episode_timeout_s: float, store: Store | None = None
    ) -> None:
        """store: has the runtimes of tasks."""
        self._client, self._timeout_s, self._store = client, episode_timeout_s, store
        self._limits = dataclasses.replace(limits, lifetime_s=episode_timeout_s + LIFETIME_MARGIN_S)
        self._templates: dict[tuple[str, str], asyncio.Task[str]] = {}

    def on(self, server: SandboxClient | None) -> Workspaces:
        """Provider of the same workspaces on one server. None: on any."""
        if server is None or server is self._client:
            return self
        return Workspaces(server, self._limits, self._timeout_s, self._store)

    def open(self, task: Task, *, key: str | None = None) -> Workspace:
        """Workspace of one attempt at `task`; nothing is started yet. key: see `start`."""
        return Workspace(task, lambda: self.start(task, key))

    def reopen(self, task: Task, handle: Handle, server: str) -> Workspace:
        """Workspace whose sandbox lives already, on the server with this address."""
        return Workspace(task, lambda: self._found(handle, server))

    async def _found(self, handle: Handle, server: str) -> Sandbox:
        try:
            return await self._client.adopt(handle, server)
        except EnvdError as error:
            raise InfraFault(f"the sandbox of the episode can't be reached: {error}") from error

    async def start(self, task: Task, key: str | None = None) -> Sandbox:
        """Start a fresh sandbox of `task`, waiting a while for a server that starts again. key: of idempotency.

        Raises InfraFault.
        """
        waits_until, stored_again = time.monotonic() + _RETURN_S, False
        while True:
            try:
                return await self._client.create(
                    await self._stored(task),
                    limits=self._limits_of(task),
                    env=task.environment.variables(task.files),
                    runtime=task.environment.runtime,
                    toolset=task.toolset,
                    idempotency_key=key,
                    **recording(task.final_state),
                )
            except TriplaneError as error:
                self._templates.pop(self._key(task), None)
                if isinstance(error, ServerUnavailable) and time.monotonic() < waits_until:
                    await asyncio.sleep(_RETURN_PAUSE_S)
                elif isinstance(error, TemplateError) and not stored_again:
                    stored_again = True  # a server removes templates that were not used for long
                else:
                    raise InfraFault(f"no sandbox for task {task.task_id}: {error}") from error

    async def _stored(self, task: Task) -> str:
        key = self._key(task)
        storing = self._templates.get(key)
        if storing is None:
            storing = self._templates[key] = asyncio.create_task(self._store_files(task))
        return await asyncio.shield(storing)

    async def _store_files(self, task: Task) -> str:
        runtime = task.environment.runtime
        if runtime:
            archive = await asyncio.to_thread(runtime_archive, self._store, runtime)
            await self._client.put_runtime(runtime, archive)
        return await self._client.put_template(task.files, task.base)

    def _limits_of(self, task: Task) -> Limits:
        least = task.environment.memory_mb or 0
        return dataclasses.replace(self._limits, memory_mb=max(self._limits.memory_mb, least))

    @staticmethod
    def _key(task: Task) -> tuple[str, str]:
        return task.files_digest, task.environment.runtime


class Workspace:
    """Sandbox of one attempt. An attempt without tool calls starts none and leaves an empty diff."""

    def __init__(self, task: Task, start: Callable[[], Coroutine[Any, Any, Sandbox]]) -> None:
        """start: starts the sandbox, or finds it again."""
        self._task, self._start = task, start
        self._starting: asyncio.Task[Sandbox] | None = None
        self._lost = False
        self.server: SandboxClient | None = None
        """Client of the server that the sandbox lives on, once it has started."""

    async def started(self) -> Sandbox:
        """The sandbox, started if it was not. Raises InfraFault."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        # shielded: a sandbox whose start is cut off by a deadline would have no owner to close it
        sandbox = await asyncio.shield(self._starting)
        self.server = sandbox.server
        return sandbox

    async def run(self, calls: Sequence[ToolCall], timeout_s: float, key: str | None = None) -> list[ToolResult]:
        """Run one turn's calls, answers in call order. timeout_s: of one call. key: of idempotency.

        Raises InfraFault when no sandbox starts, SandboxBroken when the one that started fails.
        """
        sandbox = await self.started()
        try:
            return await sandbox.batch(calls, timeout_s=timeout_s, idempotency_key=key)
        except IdempotencyError as error:
            raise InfraFault(f"the answers of calls that have run are lost: {_words(error, sandbox)}") from error
        except EnvdError as error:
            raise self._broken("a tool call failed", error, sandbox) from error

    async def finish(self, key: str | None = None) -> bytes:
        """Take the final diff, of the task's deliverables if it declares any, or the requests that the sandbox made if
        they are the final state; the sandbox is gone afterwards. key: of idempotency.

        Raises SandboxBroken.
        """
        if self._starting is None:
            return b""
        deliverables = self._task.deliverables
        sandbox = await asyncio.shield(self._starting)
        try:
            diff = await sandbox.finish(export=Export(deliverables) if deliverables else None, idempotency_key=key)
        except IdempotencyError as error:
            raise InfraFault(f"the final state that was taken is lost: {_words(error, sandbox)}") from error
        except EnvdError as error:
            raise self._broken("the final state could not be read", error, sandbox) from error
        self._starting = None
        return sandbox.requests if isinstance(self._task.final_state, RequestsState) else diff

    def _broken(self, what: str, error: EnvdError, sandbox: Sandbox) -> SandboxBroken:
        self._lost = self._lost or isinstance(error, ServerLost)
        return SandboxBroken(f"{what}: {_words(error, sandbox)}")

    def for_record(self, fault: InfraFault) -> str:
        """Text of a fault without the server's address, which no record of an episode may depend on."""
        return str(fault) if self.server is None else str(fault).replace(f" at {self.server.address}", "")

    async def is_known(self) -> bool:
        """Whether the server still knows this sandbox, alive or ended: False once it was restarted or lost."""
        if self._lost:
            return False
        if self._starting is None:
            return True
        try:
            await (await asyncio.shield(self._starting)).status()
        except (SandboxUnknown, ServerLost):
            return False
        except TriplaneError:
            return True
        return True

    async def close(self) -> None:
        """Destroy the sandbox if it still lives. Never raises for one that can't be reached: its lifetime ends it."""
        if self._starting is None:
            return
        starting, self._starting = self._starting, None
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await (await starting).close()
        except (TriplaneError, TimeoutError) as error:
            _log.warning("a sandbox of task %s was not closed (%s): its lifetime ends it", self._task.task_id, error)


def _words(error: EnvdError, sandbox: Sandbox) -> str:
    """Text of an error without the sandbox's id, which no record of an episode may depend on."""
    return str(error).replace(sandbox.id, "of the episode")
