"""State of one live sandbox in the server, with the locking between its calls, which run concurrently, and its state
changes, which run alone.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from envd.backends.base import Backend, Box, BoxSpec
from envd.errors import SandboxGone, WrongState
from envd.guest.link import GuestLink
from envd.server.egress import Proxy
from envd.server.egress_record import RequestRecord
from envd.server.idempotency import Answers
from envd.server.quotas import Claim
from envd.server.rules import Decisions

State = Literal["running", "paused", "hibernated"]
T = TypeVar("T")
QUIET_S = 10.0
"""Maximum time, in seconds, that a state change waits for running calls."""
_FIX = {"paused": "call Resume", "hibernated": "call Resume"}


@dataclass(eq=False)
class Live:
    """A live sandbox. While it is hibernated, `box` is None and its state is below `stored`."""

    identity: str
    token: str
    backend: Backend
    spec: BoxSpec
    box: Box | None
    decisions: Decisions
    """Decisions of the rules about it."""
    rules_yaml: str = ""
    """Rules of its request, for copies of it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    state: State = "running"
    stored: Path | None = None
    lost: tuple[str, ...] = ()
    proxy: Proxy | None = None
    """Egress proxy, while the sandbox has a box and its rules allow destinations."""
    spent_s: float = 0.0
    """Processor time, in seconds, of its earlier boxes."""
    created: float = field(default_factory=time.monotonic)
    expires: float = 0.0
    """`created` and `expires` are on the monotonic clock."""
    timer: asyncio.TimerHandle | None = None
    ended: str = ""
    """Reason of its end; empty while it lives."""
    noted: dict[str, int] = field(default_factory=dict)
    """Number of recorded hits, by limit."""
    claim: Claim | None = None
    """Its share of its key's quotas."""
    toolset: str = ""
    """Name of its toolset; empty: the default one."""
    requests: RequestRecord | None = None
    """Record of its requests through the proxy, if its request wanted one."""
    answers: Answers = field(default_factory=Answers)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changing: asyncio.Event | None = None
    _calls: int = 0
    _idle: asyncio.Event | None = None
    _polls: set[asyncio.Future[Any]] = field(default_factory=set)

    def died(self) -> str | None:
        """Reason why its agent ended by itself; None if it has not, or during a state change."""
        return None if self.box is None or self._changing is not None else self.box.guest.gone

    def is_token(self, token: str) -> bool:
        """Whether this is the sandbox's token, compared in constant time."""
        return secrets.compare_digest(self.token.encode(), token.encode())

    def using(self) -> _Use:
        """Context manager of one call: `async with live.using() as guest`.

        It waits while the state changes. Raises SandboxGone, and WrongState if the sandbox does not run.
        """
        return _Use(self)

    async def poll(self, ask: Awaitable[T]) -> T | None:
        """Await a long poll of the guest. Returns None if a state change cancelled it; the caller then polls the new
        guest.
        """
        poll: asyncio.Future[T] = asyncio.ensure_future(ask)
        self._polls.add(poll)
        try:
            await asyncio.wait({poll})
        finally:
            self._polls.discard(poll)
            if not poll.done():
                poll.cancel()
                await asyncio.wait({poll})  # the owner can't close an async generator that still runs
            if not poll.cancelled():
                poll.exception()  # marks it as retrieved, also if the caller was cancelled
        if poll.cancelled():
            return None
        return poll.result()

    async def guest_soon(self) -> GuestLink:
        """Wait for the end of a state change, then return the guest. Raises as `using` does."""
        while self._changing is not None:
            await self._changing.wait()
        self.require_running()
        assert self.box is not None
        return self.box.guest

    def require_running(self) -> None:
        """Raise SandboxGone or WrongState, with the fix, if the sandbox does not run."""
        self.require_alive()
        if self.state != "running":
            raise WrongState(f"sandbox {self.identity[:40]} is {self.state}: {_FIX[self.state]} first")

    def require_alive(self) -> None:
        """Raise SandboxGone if the sandbox has ended."""
        if self.ended:
            raise SandboxGone(f"no sandbox {self.identity[:40]!r}: {self.ended}")

    @asynccontextmanager
    async def change(self, *, quiet: bool = False) -> AsyncIterator[None]:
        """Run the block as the sandbox's only state change. Raises SandboxGone, WrongState.

        quiet: also wait at most QUIET_S for running calls, hold later calls and interrupt long polls, which their
        callers repeat.
        """
        async with self._lock:
            self.require_alive()
            if not quiet:
                yield
                return
            self._changing = asyncio.Event()
            try:
                await self._quiet()
                yield
            finally:
                self._changing.set()
                self._changing = None

    def alone(self) -> asyncio.Lock:
        """Lock that excludes state changes: `async with live.alone()`. Unlike `change`, also for an ended sandbox."""
        return self._lock

    async def _quiet(self) -> None:
        for poll in list(self._polls):
            poll.cancel()
        if self._calls and self.state == "running":
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._idle.wait()
            except TimeoutError as error:
                words = f"{self._calls} calls still run in sandbox {self.identity[:40]}"
                raise WrongState(f"{words}: wait for them, or end them, then try again") from error
            finally:
                self._idle = None


class _Use:
    """Context manager that counts one running call."""

    __slots__ = ("_live",)

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __aenter__(self) -> GuestLink:
        live = self._live
        while live._changing is not None:
            await live._changing.wait()
        live.require_running()
        assert live.box is not None
        live._calls += 1
        return live.box.guest

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live = self._live
        live._calls -= 1
        if live._idle is not None and not live._calls:
            live._idle.set()
