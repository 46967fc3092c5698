"""What the boxes of all virtual machines share: pause, resume, usage and end, over a machine that halts and goes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from envd.backends.base import Usage
from envd.backends.vm.machine import About
from envd.guest.link import GuestLink


class Machine(Protocol):
    """A virtual machine that runs."""

    async def halt(self) -> None:
        """Stop it where it stands; asks under way wait for `go`."""
        ...

    async def go(self) -> None:
        """Let it run."""
        ...

    async def end(self) -> None:
        """Kill it and leave nothing of it. Idempotent."""
        ...

    def usage(self) -> tuple[int, float]:
        """(bytes of memory of its own, seconds of processor time)."""
        ...


M = TypeVar("M", bound=Machine)


class MachineBox(ABC, Generic[M]):
    """A running machine with an agent in it. A subclass says how its state is written."""

    def __init__(self, machine: M, guest: GuestLink, about: About, left: Callable[[], None]) -> None:
        """left: called once the machine has ended."""
        self._machine, self._guest, self._about, self._left = machine, guest, about, left
        self._paused = False
        self._ending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def guest(self) -> GuestLink:
        """The agent in it."""
        return self._guest

    async def pause(self) -> None:
        """Stop the machine."""
        async with self._turn:
            if not self._paused:
                await self._machine.halt()
                self._paused = True

    async def resume(self) -> None:
        """Let the machine run."""
        async with self._turn:
            if self._paused:
                await self._machine.go()
                self._paused = False

    async def usage(self) -> Usage:
        """Memory and processor time of its VMM."""
        memory, cpu_s = self._machine.usage()
        return Usage(memory_bytes=memory, cpu_s=cpu_s)

    async def destroy(self) -> None:
        """End it. Idempotent; goes on when its caller gives up."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    @asynccontextmanager
    async def _halted(self) -> AsyncIterator[None]:
        """The machine stands still for the block; afterwards it runs if it did before. The caller holds `_turn`."""
        if not self._paused:
            await self._machine.halt()
        try:
            yield
        finally:
            if not self._paused and self._guest.gone is None:
                await self._machine.go()

    async def _end(self) -> None:
        await self._machine.end()
        self._let_go()
        self._left()

    @abstractmethod
    def _let_go(self) -> None:
        """Close what the box owns; the machine has ended."""
