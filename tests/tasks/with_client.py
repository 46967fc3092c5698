"""Run jobs with a client of a sandbox server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from contracts.store import Store
from contracts.tasks import Task
from curation.tasks.agents import agent_named, play_suite
from curation.verify import Verifier
from envd.client import SandboxClient

T = TypeVar("T")


def with_client(address: str, job: Callable[[SandboxClient], Awaitable[T]]) -> T:
    """Result of the job, whose client is closed afterwards."""

    async def run() -> T:
        async with SandboxClient(address) as client:
            return await job(client)

    return asyncio.run(run())


def check_agents(tasks: list[Task], store: Store, address: str) -> None:
    """The fix solves every task, and nothing solves none."""
    for agent, solved in (("oracle", True), ("noop", False)):
        played = with_client(
            address,
            lambda client, agent=agent: play_suite(  # type: ignore[misc]
                tasks, agent_named(agent), client, Verifier(client, None, runtimes=store)
            ),
        )
        assert [each.verdict.solved for each in played] == [solved] * len(tasks)
