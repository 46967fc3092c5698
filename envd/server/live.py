"""One live sandbox as the server keeps it, and who may use it when: calls side by side, or one change of state
alone.
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
from envd.server.idempotency import Answers
from envd.server.quotas import Claim
from envd.server.rules import Decisions

State = Literal["running", "paused", "hibernated"]
T = TypeVar("T")
QUIET_S = 10.0
"""How long a change of state waits for calls that still run."""
_FIX = {"paused": "call Resume", "hibernated": "call Resume"}


@dataclass(eq=False)
class Live:
    """A sandbox. `box` is None while it is hibernated; its state is below `stored` then."""

    identity: str
    token: str
    backend: Backend
    spec: BoxSpec
    box: Box | None
    decisions: Decisions
    """What the rules decided about it."""
    rules_yaml: str = ""
    """As it was asked for, for copies of it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    state: State = "running"
    stored: Path | None = None
    lost: tuple[str, ...] = ()
    proxy: Proxy | None = None
    """Its way out, while it has a box whose rules allow destinations."""
    spent_s: float = 0.0
    """Processor time of the boxes that it had before this one."""
    created: float = field(default_factory=time.monotonic)
    expires: float = 0.0
    """Both on the monotonic clock."""
    timer: asyncio.TimerHandle | None = None
    ended: str = ""
    """Why it is no more; empty while it lives."""
    noted: dict[str, int] = field(default_factory=dict)
    """How often it hit which limit, as far as that was recorded."""
    claim: Claim | None = None
    """What it takes of its key's quotas."""
    answers: Answers = field(default_factory=Answers)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changing: asyncio.Event | None = None
    _calls: int = 0
    _idle: asyncio.Event | None = None
    _polls: set[asyncio.Future[Any]] = field(default_factory=set)

    def died(self) -> str | None:
        """Why its agent has gone by itself; None where it has not, or its state is just being changed."""
        return None if self.box is None or self._changing is not None else self.box.guest.gone

    def is_token(self, token: str) -> bool:
        """Whether this is its token, in a time that does not tell how much of it is right."""
        return secrets.compare_digest(self.token.encode(), token.encode())

    def using(self) -> _Use:
        """`async with live.using() as guest`: a call.

        Waits while its state changes; raises WrongState where it does not run.
        """
        return _Use(self)

    async def poll(self, ask: Awaitable[T]) -> T | None:
        """Await an ask that may last; None when a change of state ended it early, so that the caller asks the guest
        that is there then.
        """
        poll: asyncio.Future[T] = asyncio.ensure_future(ask)
        self._polls.add(poll)
        try:
            await asyncio.wait({poll})
        finally:
            self._polls.discard(poll)
            if not poll.done():
                poll.cancel()
                await asyncio.wait({poll})  # what still runs can't be closed by its owner
            if not poll.cancelled():
                poll.exception()  # looked at, also where the caller has gone
        if poll.cancelled():
            return None
        return poll.result()

    async def guest_soon(self) -> GuestLink:
        """The guest, once no change of state is under way. Raises as `using` does."""
        while self._changing is not None:
            await self._changing.wait()
        self.require_running()
        assert self.box is not None
        return self.box.guest

    def require_running(self) -> None:
        """Raise SandboxGone or WrongState, with the fix, where it does not run."""
        self.require_alive()
        if self.state != "running":
            raise WrongState(f"sandbox {self.identity[:40]} is {self.state}: {_FIX[self.state]} first")

    def require_alive(self) -> None:
        """Raise SandboxGone where it has ended."""
        if self.ended:
            raise SandboxGone(f"no sandbox {self.identity[:40]!r}: {self.ended}")

    @asynccontextmanager
    async def change(self, *, quiet: bool = False) -> AsyncIterator[None]:
        """The block alone changes the state. quiet: calls that run are waited for, later ones wait, long polls end and
        are asked again.
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
        """`async with live.alone():` when no change of state is under way; unlike `change` also where it has ended."""
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
    """Counts one call in and out."""

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
