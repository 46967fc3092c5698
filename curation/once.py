"""Work that several callers ask for, done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Once(Generic[K, V]):
    """Does the work of a key once and keeps its result. A caller that is cancelled ends it for no other.

    final: errors that are kept as results. After any other error the next caller starts the work anew.
    """

    def __init__(self, *final: type[BaseException]) -> None:
        self._final = final
        self._work: dict[K, asyncio.Task[V]] = {}

    def done(self, key: K) -> bool:
        """Whether the work has ended."""
        return key in self._work and self._work[key].done()

    async def get(self, key: K, make: Callable[[], Coroutine[None, None, V]]) -> V:
        """Result for `key`. Raises what `make` raised."""
        work = self._work.get(key)
        if work is None or (work.done() and self._failed(work)):
            work = self._work[key] = asyncio.create_task(make())
        return await asyncio.shield(work)

    def _failed(self, work: asyncio.Task[V]) -> bool:
        if work.cancelled():
            return True
        error = work.exception()
        return error is not None and not isinstance(error, self._final)
