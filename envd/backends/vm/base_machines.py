"""Machines that were booted once to start others from: one a template and shape; the least recently used are let go."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from envd.backends.vm.machine import Shape

Key = tuple[str, Shape]
_SHARE = 0.25
"""Of the host's memory. Usually a base machine holds some 100 MB."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class BaseMachine:
    """A stopped machine in two memory files, sealed: nobody, not even a VMM that was taken over, can change what others
    start from.
    """

    def __init__(self, memory_bytes: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._memory = os.memfd_create("memory", flags)
        self._state = os.memfd_create("state", flags)
        os.ftruncate(self._memory, memory_bytes)

    @property
    def raw(self) -> tuple[int, int]:
        """(memory, state) while the machine is booted into them."""
        return self._memory, self._state

    def seal(self) -> None:
        """Nothing is written any more. The machine that wrote must have ended."""
        for fd in (self._memory, self._state):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)

    @contextmanager
    def opened(self) -> Iterator[tuple[int, int]]:
        """(memory, state) as descriptors of the caller's own, which outlive the base machine."""
        with ExitStack() as held:
            memory = os.dup(self._memory)
            held.callback(os.close, memory)
            # opened anew, since a duplicate would share its position with the other starts under way
            state = os.open(f"/proc/self/fd/{self._state}", os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, state)
            yield memory, state

    def close(self) -> None:
        """Let go of it; machines that started from it keep what they map."""
        os.close(self._memory)
        os.close(self._state)


def base_machine_budget_mb() -> int:
    """Memory that base machines may hold on this host, in MiB."""
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE) >> 20


class Closable(Protocol):
    """What is kept for a base machine."""

    def close(self) -> None:
        """Let go of it."""
        ...


T = TypeVar("T", bound=Closable)


class BaseMachines(Generic[T]):
    """Boots each base machine once, however many ask at the same time."""

    def __init__(self, budget_mb: int) -> None:
        """budget_mb: memory that all of them together may hold, by their whole sizes; the one just asked for stays in
        any case.
        """
        self._budget_mb = budget_mb
        self._known: OrderedDict[Key, asyncio.Task[T]] = OrderedDict()

    async def get(self, key: Key, boot: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The base machine, booted by the first who asks. A boot that fails is tried again by the next one."""
        making = self._known.get(key)
        if making is None or _failed(making):
            making = self._known[key] = asyncio.create_task(boot())
        self._known.move_to_end(key)
        # shielded: who gives up leaves the boot to the others
        booted = await asyncio.shield(making)
        self._shrink()
        return booted

    async def forget(self, template: str) -> None:
        """Let go of a template's base machines."""
        for key in [key for key in self._known if key[0] == template]:
            making = self._known.pop(key)
            if not making.done():
                making.cancel()
                await asyncio.wait([making])
            if not _failed(making):
                making.result().close()

    async def close(self) -> None:
        """Let go of all, also of those being booted."""
        known, self._known = self._known, OrderedDict()
        for making in known.values():
            making.cancel()
        for ended in await asyncio.gather(*known.values(), return_exceptions=True):
            if not isinstance(ended, BaseException):
                ended.close()

    def _shrink(self) -> None:
        held = sum(shape.machine_mb for _, shape in self._known)
        for key in list(self._known)[:-1]:
            making = self._known[key]
            if held > self._budget_mb and making.done():
                held -= key[1].machine_mb
                del self._known[key]
                if not _failed(making):
                    making.result().close()


def _failed(making: asyncio.Task[T]) -> bool:
    return making.done() and (making.cancelled() or making.exception() is not None)
