"""One vLLM server of a fleet: its engine, its load, and whether it may be asked."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from contracts.errors import TriplaneError
from contracts.retries import backoff_s
from inference.engines.base import Piece, SamplingParams
from inference.engines.config import VllmConfig
from inference.engines.marks import unproven
from inference.engines.policies import PolicyFiles, Preparer
from inference.engines.sidecar import Sidecar, sidecar_address
from inference.engines.vllm import VllmEngine
from inference.errors import EngineUnreachable, StaleVersion

T = TypeVar("T")
STALE = 3
"""StaleVersion faults after which a server is given up until the next policy: another client uses it, and two clients
would take it from each other for ever.
"""
OTHERS_S = (10.0, 40.0, 160.0)
"""Seconds to wait for another client that loads the same policy, before an own attempt."""
_PAUSE_S, _LONGEST_S = 2.0, 60.0


class Replica:
    """A server of the fleet. Nothing is sent to it unless `serves`: it is updated and verified."""

    def __init__(self, config: VllmConfig, url: str, files: PolicyFiles, preparer: Preparer) -> None:
        """config: of the fleet."""
        self.url = url
        own = config.model_copy(update={"base_url": url, "retries": 0, "weights_port": None})
        self._sidecar: Sidecar | None = None
        if config.weights_port is not None:
            self._sidecar = Sidecar(sidecar_address(url, config.weights_port), timeout_s=config.startup_timeout_s)
            self.engine = VllmEngine(own, files, preparer=preparer, place=self._sidecar.pull, waits=False)
        else:
            self.engine = VllmEngine(own, files, preparer=preparer, waits=False)
        self.serves = False
        self.in_flight = 0
        self.fault: Exception | None = None
        """Why it does not serve, or None."""
        self._failures = self._stale = 0
        self._due = 0.0
        self.joining: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[None] | None = None

    async def update(self, files: PolicyFiles) -> None:
        """Make the server serve the policy, and verify that. Failures are kept in `fault`, nothing is raised."""
        self.serves = False
        try:
            await self._load(files)
        except TriplaneError as error:
            self.leave_out(error)
        else:
            self._lost = asyncio.get_running_loop().create_future()
            self.serves, self.fault = True, None

    async def _load(self, files: PolicyFiles) -> None:
        """Load the policy. Clients of one policy, such as the shards of an iteration, let each other finish: each waits
        for a while, longer each time, as the other one may have died.
        """
        prefix = unproven(files.version)
        for wait_s in OTHERS_S:
            until = time.monotonic() + wait_s
            while (await self.engine.mark()).startswith(prefix) and time.monotonic() < until:
                await asyncio.sleep(random.uniform(0.2, 0.6))
            try:
                await self.engine.load(files)
                return
            except StaleVersion:
                mark = await self.engine.mark()
                if wait_s == OTHERS_S[-1] or not (mark == files.version or mark.startswith(prefix)):
                    raise

    def leave_out(self, fault: Exception) -> None:
        """Do not ask this server until it is updated and verified again."""
        self.engine.doubt()
        self.serves, self.fault = False, fault
        self._failures += 1
        patient = self._failures + isinstance(fault, StaleVersion) - 1
        pause = backoff_s(patient, _PAUSE_S, _LONGEST_S) if patient else 0.0
        self._stale += isinstance(fault, StaleVersion)
        self._due = math.inf if self._stale >= STALE else time.monotonic() + pause

    def forgive(self) -> None:
        """Forget earlier failures, for a new policy."""
        self._failures = self._stale = 0
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether it is time to try again to update a server that was left out."""
        return not self.serves and (self.joining is None or self.joining.done()) and time.monotonic() >= self._due

    @property
    def is_given_up(self) -> bool:
        """Whether nothing is tried with this server until the next policy or lease."""
        return not self.serves and self._due == math.inf

    def abandon(self) -> None:
        """End the calls in flight with EngineUnreachable: the server does not reply."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """Result of a call of `engine`, counted as load."""
        self.in_flight += 1
        try:
            result = await self._unless_lost(call)
        finally:
            self.in_flight -= 1
        self._failures = 0
        return result

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """Stream of `engine`, counted as load."""
        self.in_flight += 1
        try:
            async with aclosing(self.engine.stream(prompt_ids, params)) as pieces:
                while (piece := await self._unless_lost(_next(pieces))) is not None:
                    if piece.finish_reason is not None:  # whoever reads it may close the stream
                        self._failures = 0
                    yield piece
        finally:
            self.in_flight -= 1

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Result of a call. Raises EngineUnreachable if the server is abandoned meanwhile."""
        assert self._lost is not None, "asked after an update"
        lost, task = self._lost, asyncio.ensure_future(call)
        try:
            both: set[asyncio.Future[Any]] = {task, lost}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineUnreachable(f"{self.url} does not reply any more: the call goes to another server")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        self.serves = False
        self.abandon()
        if self.joining is not None:
            self.joining.cancel()
            await asyncio.gather(self.joining, return_exceptions=True)
        await self.engine.close()
        if self._sidecar is not None:
            await self._sidecar.close()


async def _next(pieces: AsyncGenerator[Piece]) -> Piece | None:
    """The next piece; None: there is none."""
    return await anext(pieces, None)
