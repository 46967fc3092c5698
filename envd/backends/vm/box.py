"""Base class of the boxes of all virtual machines: pause, resume, usage and end."""

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
    """A running virtual machine."""

    async def halt(self) -> None:
        """Pause the machine; pending requests to the agent wait for `go`."""
        ...

    async def go(self) -> None:
        """Resume the machine."""
        ...

    async def end(self) -> None:
        """Kill the machine and remove its resources. Idempotent."""
        ...

    def usage(self) -> tuple[int, float]:
        """(bytes of private memory, seconds of processor time) of its VMM."""
        ...


M = TypeVar("M", bound=Machine)


class MachineBox(ABC, Generic[M]):
    """A running machine with an agent in it. Subclasses implement snapshots."""

    def __init__(self, machine: M, guest: GuestLink, about: About, left: Callable[[], None]) -> None:
        """left: called when the machine has ended."""
        self._machine, self._guest, self._about, self._left = machine, guest, about, left
        self._paused = False
        self._ending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @property
    def guest(self) -> GuestLink:
        """Connection to the sandbox's agent."""
        return self._guest

    async def pause(self) -> None:
        """Pause the machine. Idempotent."""
        async with self._turn:
            if not self._paused:
                await self._machine.halt()
                self._paused = True

    async def resume(self) -> None:
        """Resume the machine. Idempotent."""
        async with self._turn:
            if self._paused:
                await self._machine.go()
                self._paused = False

    async def usage(self) -> Usage:
        """Memory and processor time of its VMM."""
        memory, cpu_s = self._machine.usage()
        return Usage(memory_bytes=memory, cpu_s=cpu_s)

    async def destroy(self) -> None:
        """End the machine. Idempotent; continues if the caller is cancelled."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    @asynccontextmanager
    async def _halted(self) -> AsyncIterator[None]:
        """Pause the machine for the block, and resume it afterwards if it ran before. The caller holds `_turn`."""
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
        """Close the box's own resources after the machine has ended."""
