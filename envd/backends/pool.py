"""A warm pool: sandboxes that are started before they are asked for.

One key a template, limits, environment and look: nothing is left to tell a sandbox at its hand-out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from envd.backends.base import BoxSpec
from envd.errors import EnvdError

_MOST_KEYS = 8
"""Kinds that boxes are held for; those asked for least recently are let go."""
_log = logging.getLogger("envd")


class Poolable(Protocol):
    """What can wait in a pool."""

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        ...

    async def destroy(self) -> None:
        """End it."""
        ...


T = TypeVar("T", bound=Poolable)


class Pool(Generic[T]):
    """Holds up to `size` boxes a key, and refills behind what is taken, one box at a time and after whoever waits for one."""

    def __init__(self, start: Callable[[BoxSpec], Awaitable[T]], size: int) -> None:
        self._start, self._size = start, size
        self.hits = self.misses = 0
        """How often one was ready, and was not."""
        self._ready: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._specs: dict[Hashable, BoxSpec] = {}
        self._seen: deque[Hashable] = deque(maxlen=4 * _MOST_KEYS)
        self._creating = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._wanted = asyncio.Event()
        self._refill: asyncio.Task[None] | None = None

    def take(self, spec: BoxSpec) -> T | None:
        """A box for this spec, or None: then one must be started. Either way more are made ready for the next."""
        if self._size == 0:
            return None
        look = (spec.host_name, spec.read_only, tuple(sorted(spec.env.items())))
        if spec.env and not self._again(spec):
            return None
        key = (spec.template, replace(spec.limits, lifetime_s=0), look)
        ready = self._ready.setdefault(key, deque())
        self._ready.move_to_end(key)
        self._specs[key] = replace(spec, name="pool")
        self._wanted.set()
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._keep_full())
        while ready:
            box = ready.popleft()
            if box.alive:
                self.hits += 1
                return box
        self.misses += 1
        return None

    def _again(self, spec: BoxSpec) -> bool:
        """Whether this environment was asked for before: those that one sandbox alone has are not worth a place."""
        environment = tuple(sorted(spec.env.items()))
        seen = environment in self._seen
        self._seen.append(environment)
        return seen

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While somebody waits for a box that is being started, the pool starts none."""
        self._creating += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._creating -= 1
            if self._creating == 0:
                self._quiet.set()

    async def stop(self) -> None:
        """Destroy what is ready, and make no more."""
        self._size = 0
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        while self._ready:
            await self._drop(next(iter(self._ready)))

    async def _keep_full(self) -> None:
        while True:
            await self._wanted.wait()
            while len(self._ready) > _MOST_KEYS:
                await self._drop(next(iter(self._ready)))
            short = [key for key, ready in self._ready.items() if len(ready) < self._size]
            if not short:
                self._wanted.clear()
                continue
            await self._quiet.wait()
            key = short[-1]  # the one asked for last
            try:
                box = await self._start(self._specs[key])
            except (EnvdError, OSError) as error:
                _log.warning("the warm pool can't be refilled: %s", error)
                self._wanted.clear()  # until the next is asked for
                continue
            if key in self._ready:
                self._ready[key].append(box)
            else:
                await box.destroy()

    async def _drop(self, key: Hashable) -> None:
        del self._specs[key]
        boxes = self._ready.pop(key)
        await asyncio.gather(*(box.destroy() for box in boxes), return_exceptions=True)
