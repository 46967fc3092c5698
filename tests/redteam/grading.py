"""Grades final states with the real verifier on a real envd server."""

from __future__ import annotations

import asyncio
import dataclasses
from types import TracebackType
from typing import Protocol, Self

from contracts.errors import InfraFault
from contracts.tasks import Task
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd
from tests.redteam.worlds import World


class State(Protocol):
    """A final state of a task."""

    @property
    def name(self) -> str:
        """Unique."""

    @property
    def world(self) -> World:
        """The task."""

    def diff(self) -> bytes:
        """The state, as a patch."""


@dataclasses.dataclass(frozen=True)
class Graded:
    """A state's verdict; None where the verifier gave none."""

    state: State
    verdict: Verdict | None
    fault: str = ""

    @property
    def findings(self) -> list[str]:
        """Names of what was found."""
        return [each.name for each in self.verdict.findings] if self.verdict else []


class Grader:
    """A server of its own and a client of it, within one event loop."""

    def __enter__(self) -> Self:
        self._envd = LocalEnvd()
        self._envd.__enter__()
        self._runner = asyncio.Runner()
        self._proved: dict[str, Task] = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.close()
        self._envd.__exit__(kind, error, trace)

    @property
    def address(self) -> str:
        """The server's."""
        return self._envd.address

    def grade(self, *states: State, at_once: int = 2, confirm: bool = False) -> list[Graded]:
        """The verdicts of some states, in order, none remembered; a fault of the verifier is noted, not raised.

        confirm: as where rewards pay for passed tests.
        """
        return self._runner.run(self._grade(states, at_once, confirm))

    async def _grade(self, states: tuple[State, ...], at_once: int, confirm: bool) -> list[Graded]:
        slots = asyncio.Semaphore(at_once)
        async with SandboxClient(self.address) as client:
            verifier = Verifier(client, None)
            grade = verifier.confirm if confirm else verifier.grade

            async def one(state: State) -> Graded:
                async with slots:
                    try:
                        return Graded(state, await grade(await self._task(verifier, state.world), state.diff()))
                    except InfraFault as fault:
                        return Graded(state, None, str(fault))

            return list(await asyncio.gather(*(one(state) for state in states)))

    async def _task(self, verifier: Verifier, world: World) -> Task:
        """The task with its checks, which a suite's builder would have proved."""
        if world.name not in self._proved:
            self._proved[world.name] = dataclasses.replace(world.task, checks=await verifier.checks(world.task))
        return self._proved[world.name]
