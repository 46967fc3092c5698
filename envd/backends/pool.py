"""Warm pool of sandboxes that are started before they are requested.

The key includes template, limits, environment and all other visible properties, so that a sandbox from the pool needs
no further setup.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from envd.backends.base import BoxSpec
from envd.errors import EnvdError

_Key = tuple[str, str, Hashable, Hashable]
"""Digests of template and runtime, limits, and all other properties."""
_MOST_KEYS = 8
"""Maximum number of keys with waiting boxes; the least recently requested keys are dropped."""
_log = logging.getLogger("envd")


class Poolable(Protocol):
    """A box that can wait in a pool."""

    @property
    def alive(self) -> bool:
        """Whether the box is usable."""
        ...

    async def destroy(self) -> None:
        """End the box."""
        ...


T = TypeVar("T", bound=Poolable)


class Pool(Generic[T]):
    """Holds up to `size` boxes per key, and replaces taken boxes, `width` at a time and only while no caller waits.

    take -> a ready box; else under_way -> the next box that is being started; else the caller starts one, in busy()
    """

    def __init__(
        self,
        start: Callable[[BoxSpec], Awaitable[T]],
        size: int,
        *,
        warm: Callable[[T], Awaitable[None]] | None = None,
        width: int = 1,
    ) -> None:
        """warm: further preparation of a waiting box. A box taken meanwhile is usable. May raise EnvdError."""
        self._start, self._size, self._warm, self._width = start, size, warm, width
        self.hits = self.misses = 0
        """Number of requests with and without a ready box."""
        self._ready: OrderedDict[_Key, deque[T]] = OrderedDict()
        self._specs: dict[_Key, BoxSpec] = {}
        self._seen: deque[Hashable] = deque(maxlen=4 * _MOST_KEYS)
        self._starting: Counter[_Key] = Counter()
        self._waiters: dict[_Key, deque[asyncio.Future[T | None]]] = {}
        """Only of keys whose boxes are being started."""
        self._starts: dict[object, _Key] = {}
        self._stale: set[object] = set()
        """Pending starts of boxes whose template has been removed."""
        self._creating = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._wanted = asyncio.Event()
        self._refills: list[asyncio.Task[None]] = []

    def take(self, spec: BoxSpec) -> T | None:
        """Take a ready box for this spec; None if there is none. In both cases the pool prepares more boxes."""
        if self._size == 0 or (spec.env and not self._again(spec)):
            return None
        key = _key(spec)
        ready = self._ready.setdefault(key, deque())
        self._ready.move_to_end(key)
        self._specs[key] = replace(spec, name="pool")
        self._wanted.set()
        if not self._refills:
            self._refills = [asyncio.create_task(self._keep_full()) for _ in range(self._width)]
        while ready:
            box = ready.popleft()
            if box.alive:
                self.hits += 1
                return box
        self.misses += 1
        return None

    async def under_way(self, spec: BoxSpec) -> T | None:
        """Wait for a box for this spec that is being started; None if all have other waiters or the start fails."""
        key = _key(spec)
        if self._starting[key] <= len(self._waiters.get(key, ())):
            return None
        waiters = self._waiters.setdefault(key, deque())
        waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in waiters:
                waiters.remove(waiter)
            elif not waiter.cancelled() and (box := waiter.result()) is not None:
                await self._keep(key, box)
            raise

    def _again(self, spec: BoxSpec) -> bool:
        """Whether this environment was requested before: the pool ignores environments of a single sandbox."""
        environment = tuple(sorted(spec.env.items()))
        seen = environment in self._seen
        self._seen.append(environment)
        return seen

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Stop the pool from starting boxes while a caller waits for one that is being started."""
        self._creating += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._creating -= 1
            if self._creating == 0:
                self._quiet.set()

    async def forget(self, digest: str) -> None:
        """Destroy the boxes of a template or runtime, ready or being started, since its files are removed."""
        self._stale |= {start for start, key in self._starts.items() if digest in key[:2]}
        for key in [key for key in self._ready if digest in key[:2]]:
            await self._drop(key)

    async def stop(self) -> None:
        """Destroy all ready boxes and stop refilling."""
        self._size = 0
        for refill in self._refills:
            refill.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        while self._ready:
            await self._drop(next(iter(self._ready)))

    async def _keep_full(self) -> None:
        while True:
            await self._wanted.wait()
            while len(self._ready) > _MOST_KEYS:
                await self._drop(next(iter(self._ready)))
            short = [key for key, ready in self._ready.items() if len(ready) + self._starting[key] < self._size]
            if not short:
                self._wanted.clear()
                continue
            await self._quiet.wait()
            try:
                await self._add(short[-1])  # the most recently requested key
            except (EnvdError, OSError) as error:
                _log.warning("the warm pool can't be refilled: %s", error)
                self._wanted.clear()  # until the next request

    async def _add(self, key: _Key) -> None:
        if key not in self._specs or len(self._ready[key]) + self._starting[key] >= self._size:
            return  # another refill has filled it
        self._starting[key] += 1
        box: T | None = None
        start = object()
        self._starts[start] = key
        try:
            box = await self._start(self._specs[key])
            if start in self._stale:
                stale, box = box, None
                await stale.destroy()
                return
        finally:
            self._starting[key] -= 1
            del self._starts[start]
            self._stale.discard(start)
            waiter = self._waiter(key)
            if not self._starting[key]:
                del self._starting[key]
                self._waiters.pop(key, None)
            if waiter is not None:
                waiter.set_result(box)
        if waiter is None and await self._keep(key, box) and self._warm is not None:
            try:
                await self._warm(box)
            except EnvdError:
                if box in self._ready.get(key, ()):
                    raise
                # else a caller has taken the box, and sees that it ended or has ended it

    def _waiter(self, key: _Key) -> asyncio.Future[T | None] | None:
        waiters = self._waiters.get(key)
        while waiters:
            if not (waiter := waiters.popleft()).done():
                return waiter
        return None

    async def _keep(self, key: _Key, box: T) -> bool:
        """Add a box to the ready ones, or destroy it if its key has been dropped. Returns whether it was added."""
        if key in self._ready and self._size > 0:
            self._ready[key].append(box)
            return True
        await box.destroy()
        return False

    async def _drop(self, key: _Key) -> None:
        del self._specs[key]
        boxes = self._ready.pop(key)
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)
        await asyncio.gather(*(box.destroy() for box in boxes), return_exceptions=True)


def _key(spec: BoxSpec) -> _Key:
    look = (
        spec.host_name,
        spec.read_only,
        spec.supervised,
        bool(spec.network),
        tuple(sorted(spec.env.items())),
    )
    return (spec.template, spec.runtime_digest, replace(spec.limits, lifetime_s=0), look)
