"""Grades final states with the real verifier on a real envd server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from curation.errors import InfraFault
from curation.verify import Verdict, Verifier
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


@dataclass(frozen=True)
class Graded:
    """A state's verdict; None where the verifier gave none."""

    state: State
    verdict: Verdict | None
    fault: str = ""

    @property
    def findings(self) -> list[str]:
        """Names of what was found."""
        return [each.name for each in self.verdict.findings] if self.verdict else []


async def grade_all(address: str, states: Iterable[State], at_once: int = 2) -> list[Graded]:
    """The verdict of every state, in order; a fault of the verifier is noted, not raised."""
    slots = asyncio.Semaphore(at_once)
    async with SandboxClient(address) as client:
        verifier = Verifier(client, None)

        async def one(state: State) -> Graded:
            async with slots:
                try:
                    return Graded(state, await verifier.grade(state.world.task, state.diff()))
                except InfraFault as fault:
                    return Graded(state, None, str(fault))

        return list(await asyncio.gather(*(one(state) for state in states)))


class Grader:
    """A server of its own for tests that grade one state after the other."""

    def __enter__(self) -> Self:
        self._envd = LocalEnvd()
        self._envd.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._envd.__exit__(kind, error, trace)

    def grade(self, state: State) -> Graded:
        """The verdict of one state."""
        return asyncio.run(grade_all(self._envd.address, [state]))[0]
