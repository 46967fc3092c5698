"""One sandbox a session: made at its first tool call, ended with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envd.client import Sandbox, SandboxClient
from envd.errors import EnvdError, SandboxGone
from envd.types import Limits, ToolCall, ToolResult

_log = logging.getLogger(__name__)


@dataclass
class _Session:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    sandbox: Sandbox | None = None
    calls: int = 0
    """Under way."""
    used: float = field(default_factory=time.monotonic)


class Sessions:
    """The sandboxes of all sessions, by the sessions' keys."""

    def __init__(
        self,
        client: SandboxClient,
        files: Mapping[str, bytes],
        limits: Limits,
        timeout_s: float,
        most: int,
        toolset: str = "",
    ) -> None:
        """files: what a workspace begins with. timeout_s: of a call. most: sessions at the same time. toolset: name of
        the tools that sandboxes offer.
        """
        self.toolset = toolset
        self._client, self._files, self._limits = client, files, limits
        self._timeout_s, self._most = timeout_s, most
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def call(self, key: str, call: ToolCall) -> ToolResult:
        """Run a tool call in the session's sandbox.

        Raises EnvdError where it has none; its next call starts another.
        """
        session = self._sessions.get(key)
        if session is None:
            if len(self._sessions) >= self._most:
                raise EnvdError(f"{self._most} sessions have a sandbox: end one, or raise --max-sessions")
            session = self._sessions[key] = _Session()
        session.calls += 1
        try:
            async with session.lock:
                if session.sandbox is None:
                    template = await self._client.put_template(self._files)
                    session.sandbox = await self._client.create(
                        template, limits=self._limits, labels={"interface": "mcp"}, toolset=self.toolset
                    )
                sandbox = session.sandbox
            return await sandbox.call(call, timeout_s=self._timeout_s)
        except SandboxGone as error:
            session.sandbox = None
            raise SandboxGone(f"{error}; the next call starts a sandbox with a fresh workspace") from error
        finally:
            session.calls -= 1
            session.used = time.monotonic()

    async def end(self, key: str) -> None:
        """End a session's sandbox; one that is not known is fine."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        async with session.lock:
            if session.sandbox is None:
                return
            try:
                await session.sandbox.close()
            except EnvdError as error:
                _log.warning("a session's sandbox can't be ended, its lifetime does: %s", error)

    async def end_idle(self, idle_s: float) -> None:
        """End the sandboxes of sessions that called nothing for idle_s, again and again."""
        while True:
            await asyncio.sleep(min(idle_s / 4, 30))
            now = time.monotonic()
            for key, session in list(self._sessions.items()):
                if not session.calls and now - session.used > idle_s:
                    await self.end(key)

    async def end_all(self) -> None:
        """End every session's sandbox."""
        await asyncio.gather(*(self.end(key) for key in list(self._sessions)))


def arguments_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments as the tools take them: JSON has one kind of number, so a whole one counts as an integer."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
        for key, value in (given or {}).items()
    }
