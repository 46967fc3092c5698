"""The artifact `agent_run`: verdicts of a scripted agent that plays every task of a suite several times.

Every finished task is kept as a part (contracts.parts): a killed run repeats only those that were in flight.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact
from contracts.digests import action_key, digest_of
from contracts.parts import Parts
from contracts.store import Store
from contracts.tasks import Task
from curation.tasks.agents import Agent, Played, play_suite
from curation.verdicts import VERIFIER_VERSION
from curation.verify import Verifier
from envd.client import Limits, SandboxClient

AGENT_RUN = "agent_run"
AGENT_RUN_VERSION = f"1+{VERIFIER_VERSION}"
_FILE = "episodes.parquet"
EPISODES = pa.schema(
    [
        ("task_id", pa.string()),
        ("sample", pa.int32()),
        ("solved", pa.bool_()),
        ("turns", pa.int32()),
        ("calls", pa.int32()),
    ]
)
"""One row per episode, by task in the order of the suite, and sample."""


@dataclass(frozen=True)
class AgentRun:
    """What is played."""

    agent: str
    """Name of the agent, with the digest of a script."""
    samples: int
    """Episodes per task."""
    max_turns: int
    limits: Limits
    """Limits of each sandbox."""

    def config(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Values that affect the run, beyond the suite."""
        return {
            "agent": self.agent,
            "samples": self.samples,
            "max_turns": self.max_turns,
            "limits": asdict(self.limits),
            "tasks": digest_of([task.task_id for task in tasks]),
        }


async def run_agent(
    run: AgentRun,
    agent: Agent,
    suite: ArtifactRef,
    tasks: Sequence[Task],
    store: Store,
    client: SandboxClient,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Artifact:
    """Play tasks of a suite and publish the verdicts, or return the existing run. A killed one resumes.

    Raises TaskError if the agent fails, InfraFault if envd keeps failing.
    """
    config = run.config(tasks)
    key = action_key(AGENT_RUN, {"task_suite": suite.digest}, config, AGENT_RUN_VERSION)
    found = find_artifact(store, AGENT_RUN, key)
    if found is not None:
        return found
    parts = Parts(store, AGENT_RUN, key, [EPISODES])
    kept = _Kept(parts, await asyncio.to_thread(parts.read), run.samples)
    missing = [task for task in tasks if kept.find(task.task_id) is None]
    before, total = (len(tasks) - len(missing)) * run.samples, len(tasks) * run.samples
    progress(before, total)
    await play_suite(
        missing,
        agent,
        client,
        Verifier(client, store),
        limits=run.limits,
        max_turns=run.max_turns,
        progress=lambda done, _: progress(before + done, total),
        samples=run.samples,
        keep=kept.add,
    )
    tables = [table for task in tasks if (table := kept.find(task.task_id)) is not None]
    parents = {"task_suite": suite}
    with ArtifactWriter(store, AGENT_RUN, key, parents=parents, config=config, code_version=AGENT_RUN_VERSION) as out:
        episodes = pa.concat_tables([EPISODES.empty_table(), *tables])
        out.add_table(_FILE, episodes)
        made = out.commit(meta={"agent": run.agent, "tasks": len(tasks), "episodes": len(episodes)})
        parts.discard()  # here, where a sweep of the stage makes up for a kill
        return made


def run_outcomes(run: Artifact) -> pa.Table:
    """Columns `task_id` and `solved` of a run's episodes."""
    return run.table(_FILE, ["task_id", "solved"])


class _Kept:
    """Finished tasks of a run: found in the store, or committed as soon as all their samples are played."""

    def __init__(self, parts: Parts, found: dict[str, list[pa.Table]], samples: int) -> None:
        self._parts, self._samples = parts, samples
        self._tables = {name: tables[0] for name, tables in found.items()}
        self._open: defaultdict[str, list[Played]] = defaultdict(list)

    def find(self, task_id: str) -> pa.Table | None:
        """Episodes of a finished task, or None."""
        return self._tables.get(_part_name(task_id))

    async def add(self, played: Played) -> None:
        """Note one episode, and commit its task with the last one."""
        task_id = played.task.task_id
        own = self._open[task_id]
        own.append(played)
        if len(own) < self._samples:
            return
        rows = [_row(each) for each in sorted(self._open.pop(task_id), key=lambda each: each.sample)]
        table = pa.Table.from_pylist(rows, schema=EPISODES)
        await asyncio.to_thread(self._parts.add, _part_name(task_id), [table])
        self._tables[_part_name(task_id)] = table


def _part_name(task_id: str) -> str:
    return digest_of(task_id)[:32]


def _row(played: Played) -> dict[str, Any]:
    return {
        "task_id": played.task.task_id,
        "sample": played.sample,
        "solved": played.verdict.solved,
        "turns": played.turns,
        "calls": played.calls,
    }
