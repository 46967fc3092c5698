"""Sandboxes that can be moved to another server while their clients use them."""

from __future__ import annotations

import asyncio
from typing import Any

from envd.errors import WrongState
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.types import Handle

QUIET_S = 60.0
"""Longest wait for calls in progress before a move. Later calls wait meanwhile."""
_MIGRATE = "operations.Migrate"


class MovableSandbox(ManagedSandbox):
    """A sandbox whose calls wait while it moves, and then go to its new server."""

    def __init__(self, client: OperationsClient, handle: Handle) -> None:
        super().__init__(client, handle)
        self._calls = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()

    async def _ask(self, method: str, request: Any, timeout_s: float | None = None, key: str | None = None) -> Any:
        if method == _MIGRATE:
            return await super()._ask(method, request, timeout_s, key)
        await self._open.wait()
        self._calls += 1
        self._idle.clear()
        try:
            return await super()._ask(method, request, timeout_s, key)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def move(self, target: OperationsClient, key: str = "") -> None:
        """Go on at the server of `target`, with its processes. key: of that server.

        Raises EnvdError; the sandbox goes on where it is then.
        """
        self._open.clear()
        try:
            async with asyncio.timeout(QUIET_S):
                await self._idle.wait()
            await self.migrate(target, key=key)
            self._client = target
        except TimeoutError as error:
            raise WrongState(f"calls of sandbox {self.id} did not end within {QUIET_S:g} s") from error
        finally:
            self._open.set()
