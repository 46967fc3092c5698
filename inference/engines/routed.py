"""Engine over several engines of one policy, chosen by what each has in its prefix cache.

call --> router chooses a replica --> its engine
a replica fails --> left out for a while, its call is repeated at another one
  --> brought to the policy again in the background --> asked again

A call waits for a replica only while none serves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from contracts.errors import TriplaneError
from contracts.retries import backoff_s
from inference.engines.base import Completion, Engine, Piece, SamplingParams, collect
from inference.engines.builtin import BuiltinEngine
from inference.engines.hedging import Hedging, Streams
from inference.engines.tries import common_error, router_arguments, send_call
from inference.errors import EngineError, EngineStopped, EngineUnreachable
from inference.router import Batch, Decision, Namespace, Router
from inference.router.shared import shared_by
from inference.router.subscriber import Subscriptions, require_packages

T = TypeVar("T")
Opener = Callable[[Path, str, Callable[[Batch], None]], Engine]
"""Opens the engine of a replica for the checkpoint in a directory, with this version. The engine may call the function
with events of its prefix cache, from any thread.
"""
PAUSE_S, LONGEST_S = 2.0, 60.0
"""Seconds for which a replica is left out after its first fault, and at most."""
LATE_S = 60.0
"""Seconds after which the others no longer wait for one that does not get to a policy."""
NOBODY_S = 600.0
"""Longest time for which a call waits while no replica serves, in seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A replica to open."""

    name: str
    open: Opener
    events: tuple[str, int] | None = None
    """URL and port of the cache events of its server; None: it has none, or its engine tells them."""
    server: str | None = None
    """Address of its server; None: it belongs to this process."""


class _Replica:
    def __init__(self, member: Member, engine: Engine) -> None:
        self.name, self.events, self.engine = member.name, member.events, engine
        self._open, self._opening = member.open, threading.Lock()
        self.room = engine.room if isinstance(engine, BuiltinEngine) else math.inf
        """Tokens that its prefix cache holds; infinite: unknown."""
        self.fault: TriplaneError | None = None
        """Why it is left out, or None."""
        self.joining: asyncio.Task[bool] | None = None
        """Brings it to the policy; its result: whether it serves."""
        self.due = 0.0
        """When its pause is over, on the monotonic clock."""
        self._failures = 0

    @property
    def is_joining(self) -> bool:
        return self.joining is not None and not self.joining.done()

    @property
    def is_due(self) -> bool:
        """Whether it was left out, and its pause is over."""
        return self.fault is not None and not self.is_joining and self.due <= time.monotonic()

    @property
    def has_stopped(self) -> bool:
        """Whether it is an engine of this process that has failed for good."""
        return isinstance(self.engine, BuiltinEngine) and self.engine.stopped

    def reopen(self, directory: Path, version: str, publish: Callable[[Batch], None]) -> None:
        """Open its engine again if it has stopped. Blocks; the lock is for a call whose task was canceled."""
        with self._opening:
            if self.has_stopped:
                self.engine = self._open(directory, version, publish)

    def leave_out(self, fault: TriplaneError) -> None:
        self._failures += 1
        self.fault, self.due = fault, time.monotonic() + backoff_s(self._failures, PAUSE_S, LONGEST_S)

    def take_back(self) -> None:
        self.fault = None

    def succeeded(self) -> None:
        """Note that a call succeeded. Ignored while the replica is left out: the call began before that."""
        if self.fault is None:
            self._failures = 0


async def _pieces(replica: _Replica, prompt: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
    """Pieces of a replica."""
    async with aclosing(replica.engine.stream(prompt, params)) as pieces:
        async for piece in pieces:
            if piece.finish_reason is not None:  # whoever reads it may close the stream
                replica.succeeded()
            yield piece


class RoutedEngine:
    """See inference.engines.base.Engine. Belongs to one event loop."""

    def __init__(
        self,
        replicas: Sequence[Member],
        directory: Path,
        version: str,
        hedging_delay_s: float | None = None,
        redis_env: str | None = None,
    ) -> None:
        """replicas: for the checkpoint in `directory`. hedging_delay_s, redis_env: as in RoutedConfig. Raises
        ConfigError if a package for events or for Redis is missing, and if the variable is not set.
        """
        self._directory, self._version = directory, version
        self.hedging = None if hedging_delay_s is None else Hedging(hedging_delay_s)
        """None: nothing is hedged."""
        self._router = Router(Namespace(version))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._started = self._closed = False
        self._replicas: dict[str, _Replica] = {}
        for each in replicas:
            self._replicas[each.name] = _Replica(each, each.open(directory, version, self._listener(each.name)))
        ours = self._router, self._replicas, self._chosen
        self._streams = Streams(*ours, _pieces, self._lost, self.hedging)
        self._events = Subscriptions(self._router, None)
        self._shared = shared_by(redis_env, [each.server for each in replicas], self._router, self._events)
        if any(each.events is not None for each in replicas):
            require_packages()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate. Turns of an episode, which have the same seed, are a session of the router."""
        if self.hedging is not None and self.streams(params):
            return await collect(self.stream(prompt_ids, params))
        return await self._call(lambda engine: engine.generate(prompt_ids, params), prompt_ids, params)

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream. After a fault another replica samples the rest."""
        return self._streams.of(prompt_ids, params, hedged=self.streams(params))

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return all(each.engine.streams(params) for each in self._replicas.values())

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score."""
        return await self._call(lambda engine: engine.score(token_ids, temperature), token_ids, None)

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. Replicas that can't are left out; raises an error with each fault if none can."""
        async with self._lock:
            former = self._directory, self._version
            self._directory, self._version, self._started = directory, version, False
            try:
                await self._start()
            except BaseException:
                self._directory, self._version = former
                raise

    async def version(self) -> str:
        """See Engine.version. Brings the replicas to the version first."""
        await self._ready()
        return self._version

    async def close(self) -> None:
        """See Engine.close."""
        if self.hedging is not None and not self._closed:
            self.hedging.report()
        self._closed = True
        await self._stop_joining()
        await self._events.close()
        if self._shared is not None:
            await self._shared.close()
        await asyncio.gather(*(each.engine.close() for each in self._replicas.values()))

    def serving(self) -> list[str]:
        """Names of the replicas that are asked."""
        return self._router.replicas

    async def _call(
        self,
        call: Callable[[Engine], Coroutine[Any, Any, T]],
        prompt: Sequence[int],
        params: SamplingParams | None,
    ) -> T:
        async def ask(replica: _Replica) -> T:
            result = await call(replica.engine)
            replica.succeeded()
            return result

        return await send_call(self._router, lambda: self._chosen(prompt, params), ask, self._lost)

    async def _chosen(self, prompt: Sequence[int], params: SamplingParams | None) -> tuple[_Replica, Decision]:
        """A replica for a request, which has begun there."""
        await self._some_serve()
        decision = self._router.choose(prompt, **router_arguments(params))
        self._router.begin(decision)
        return self._replicas[decision.replica], decision

    async def _some_serve(self) -> None:
        """Return as soon as a replica serves. Raises an error with each fault if none does in time."""
        deadline = time.monotonic() + NOBODY_S
        while True:
            await self._ready()
            for each in self._replicas.values():
                if each.is_due:
                    self._joined(each)
            if self.serving():
                return
            now = time.monotonic()
            if now > deadline:
                raise self._nobody()
            joining = [each.joining for each in self._replicas.values() if each.joining is not None and each.is_joining]
            if joining:
                await asyncio.wait(joining, timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                due = min(each.due for each in self._replicas.values())
                await asyncio.sleep(min(due, deadline, now + PAUSE_S) - now)

    async def _ready(self) -> None:
        if self._closed:
            raise EngineStopped("the engine is closed: open another one")
        if self._started:
            return
        async with self._lock:
            if not self._started:
                await self._start()

    async def _start(self) -> None:
        """Bring every replica to the version. Raises an error if none gets there.

        Once one serves, those that take LATE_S seconds longer are left to join later.
        """
        self._loop = asyncio.get_running_loop()
        await self._stop_joining()
        self._router.serve(Namespace(self._version))
        pending, serves = {self._joined(each) for each in self._replicas.values()}, False
        while pending:
            timeout = LATE_S if serves else None
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            serves = serves or any(not task.cancelled() and task.result() for task in done)
        if self._closed:
            raise EngineStopped("the engine is closed: open another one")
        for each in self._replicas.values():
            if each.is_joining:
                self._leave_out(each, EngineUnreachable(f"it is still being brought to policy {self._version[:12]}"))
        if not self.serving():
            raise self._nobody()
        if self._shared is not None:
            await self._shared.start()
        self._started = True

    async def _stop_joining(self) -> None:
        joining = [each.joining for each in self._replicas.values() if each.joining is not None]
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)

    def _joined(self, replica: _Replica) -> asyncio.Task[bool]:
        """Bring a replica to the version, in the background."""
        replica.joining = asyncio.create_task(self._bring(replica))
        return replica.joining

    async def _bring(self, replica: _Replica) -> bool:
        """Make a replica serve the version, or leave it out. Returns whether it serves."""
        directory, version = self._directory, self._version
        try:
            if replica.has_stopped:
                await asyncio.to_thread(replica.reopen, directory, version, self._listener(replica.name))
            if await replica.engine.version() != version:
                await replica.engine.load_weights(directory, version)
        except TriplaneError as error:
            self._leave_out(replica, error)
            return False
        except Exception as error:  # noqa: BLE001 (whatever a damaged checkpoint raises is a fault of this replica)
            self._leave_out(replica, EngineError(f"{directory} can't be loaded: {error!r}"))
            return False
        replica.take_back()
        if replica.name not in self._router.replicas:
            self._router.add(replica.name, replica.room)
        if replica.events is not None:
            self._events.follow(replica.name, *replica.events)
        return True

    def _lost(self, replica: _Replica, fault: TriplaneError) -> None:
        """A call failed at a replica; further ones that it had then change nothing."""
        if self._closed or replica.name in self._router.replicas:
            self._leave_out(replica, fault)

    def _leave_out(self, replica: _Replica, fault: TriplaneError) -> None:
        """Send a replica no requests until it serves the policy again. Raises EngineStopped if this is closed."""
        if self._closed:
            raise EngineStopped("the engine is closed: open another one") from fault
        _log.warning("%s is left out for a while: %s", replica.name, fault)
        replica.leave_out(fault)
        self._events.leave(replica.name)
        if replica.name in self._router.replicas:
            self._router.remove(replica.name)

    def _listener(self, name: str) -> Callable[[Batch], None]:
        def published(batch: Batch) -> None:
            if self._loop is not None and not self._closed:
                try:
                    self._loop.call_soon_threadsafe(self._apply, name, batch)
                except RuntimeError:
                    return  # the loop is closed

        return published

    def _apply(self, name: str, batch: Batch) -> None:
        if name in self._router.replicas:
            self._router.apply(name, batch)

    def _nobody(self) -> TriplaneError:
        """Error with the fault of each replica; of their common type, if there is one."""
        said = f"none of {len(self._replicas)} replicas serves policy {self._version[:12]}: " + "; ".join(
            f"{each.name}: {each.fault}" for each in self._replicas.values()
        )
        return common_error(said, (each.fault for each in self._replicas.values() if each.fault is not None))
