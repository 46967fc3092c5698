"""Machines booted once, from which others start: one per template and shape; the least recently used are dropped."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from envd.backends.vm.machine import Shape

Key = tuple[str, Shape]
_SHARE = 0.25
"""Share of the host's memory for base machines. A base machine usually holds about 100 MB."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class BaseMachine:
    """A stopped machine in two sealed memory files, which nobody can change, not even a compromised VMM."""

    def __init__(self, memory_bytes: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._memory = os.memfd_create("memory", flags)
        self._state = os.memfd_create("state", flags)
        os.ftruncate(self._memory, memory_bytes)

    @property
    def raw(self) -> tuple[int, int]:
        """Descriptors (memory, state) for the machine that boots into them."""
        return self._memory, self._state

    def seal(self) -> None:
        """Make both files read-only. The machine that wrote them must have ended."""
        for fd in (self._memory, self._state):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)

    @contextmanager
    def opened(self) -> Iterator[tuple[int, int]]:
        """Duplicate descriptors (memory, state) for the block, which outlive the base machine."""
        with ExitStack() as held:
            memory = os.dup(self._memory)
            held.callback(os.close, memory)
            # Opened again, since a duplicate would share its file position with concurrent starts.
            state = os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, state)
            yield memory, state

    def close(self) -> None:
        """Close the files; machines that started from them keep their mappings."""
        os.close(self._memory)
        os.close(self._state)


def base_machine_budget_mb() -> int:
    """Return the memory that base machines may hold on this host, in MiB."""
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE) >> 20


class Closable(Protocol):
    """Resources of a base machine."""

    def close(self) -> None:
        """Release the resources."""
        ...


T = TypeVar("T", bound=Closable)


class BaseMachines(Generic[T]):
    """Boots each base machine once, also for concurrent requests."""

    def __init__(self, budget_mb: int) -> None:
        """budget_mb: MiB that all base machines together may hold, by full size, except those that callers wait for."""
        self._budget_mb = budget_mb
        self._known: OrderedDict[Key, asyncio.Task[T]] = OrderedDict()
        self._callers: Counter[Key] = Counter()

    async def get(self, key: Key, boot: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return a base machine; the first request boots it, and the next request retries a failed boot.

        Use it before the next await: it may be closed after that.
        """
        making = self._known.get(key)
        if making is None or _failed(making):
            making = self._known[key] = asyncio.create_task(boot())
        self._known.move_to_end(key)
        self._callers[key] += 1
        try:
            # shielded: a cancelled caller must not cancel the boot for others
            booted = await asyncio.shield(making)
            self._shrink()
            return booted
        finally:
            self._callers[key] -= 1
            if not self._callers[key]:
                del self._callers[key]

    async def forget(self, digest: str) -> None:
        """Cancel or close all base machines of a template or a runtime."""
        for key in [key for key in self._known if digest in (key[0], key[1].runtime)]:
            making = self._known.pop(key)
            if not making.done():
                making.cancel()
                await asyncio.wait([making])
            if not _failed(making):
                making.result().close()

    async def close(self) -> None:
        """Close all base machines and cancel pending boots."""
        known, self._known = self._known, OrderedDict()
        for making in known.values():
            making.cancel()
        for ended in await asyncio.gather(*known.values(), return_exceptions=True):
            if not isinstance(ended, BaseException):
                ended.close()

    def _shrink(self) -> None:
        held = sum(shape.machine_mb for _, shape in self._known)
        for key, making in list(self._known.items()):
            if held > self._budget_mb and making.done() and key not in self._callers:
                held -= key[1].machine_mb
                del self._known[key]
                if not _failed(making):
                    making.result().close()


def _failed(making: asyncio.Task[T]) -> bool:
    return making.done() and (making.cancelled() or making.exception() is not None)
