"""Worker of the fan-out: samples the groups of its shard and commits each as soon as it is complete.

    claim -> sample -> grade -> commit, for all groups at once; a group without variance starts the next one of the
    reserve

Kill it at any instant: committed groups stay, everything else is sampled again, with the same seeds.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import STRAGGLERS, Episode, Outcome
from contracts.errors import InfraFault
from contracts.failpoints import failpoint
from contracts.store import Store
from contracts.tasks import Task
from envd.client import Limits, SandboxClient
from inference.engines.base import Engine
from inference.errors import PlanError, StaleVersion
from inference.rollouts.claims import ClaimOwner
from inference.rollouts.episode import Player
from inference.rollouts.groups import commit_group, find_group, without_variance
from inference.rollouts.plan import GroupPlan, RolloutPlan
from inference.rollouts.progress import Meter, Progress, no_progress
from inference.rollouts.sampling import sample_group
from inference.rollouts.workspace import Workspaces

CLAIM_POLL_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GradeResult:
    """Verdict for the refill decision."""

    solved: bool | None
    """None when grading itself met an infrastructure fault."""


Grade = Callable[[Task, bytes], Awaitable[GradeResult]]
"""Grades a task's final diff. Injected: the verifier belongs to another plane."""


@dataclass(frozen=True)
class ShardReport:
    """Result of one call of `run_shard`."""

    shard: int
    groups: int
    """Groups of the shard, all committed now."""
    groups_found: int
    """Of them, committed before or by somebody else."""
    refills: int
    """Of them, drawn from the reserve."""
    episodes: int
    """Played in this call, kept or not."""
    tokens: int
    """Sampled in this call."""
    infra_errors: int
    """Episodes of the shard given up after `max_attempts`."""
    seconds: float


async def run_shard(
    plan: RolloutPlan,
    shard: int,
    *,
    engine: Engine,
    sandboxes: SandboxClient,
    tokenizer: ChatTokenizer,
    tasks: Mapping[str, Task],
    store: Store,
    grade: Grade,
    progress: Progress = no_progress,
    limits: Limits = Limits(),
) -> ShardReport:
    """Sample and commit every group of `shard`, refills included.

    Cancellation and SIGTERM close all sandboxes and keep what is committed.

    Raises PlanError for a task that `tasks` lacks, StaleVersion when the engine serves another policy than the plan's,
    and InfraFault when every episode of a group was lost to infrastructure: such a group is not committed.
    """
    await _check(plan, shard, engine, tasks)
    config = plan.config
    player = Player(
        engine=engine,
        workspaces=Workspaces(sandboxes, limits, config.episode_timeout_s),
        tokenizer=tokenizer,
        config=config,
        policy_version=plan.policy.digest,
        key=plan.key,
        gate=asyncio.Semaphore(config.concurrency),
    )
    owner = ClaimOwner(store, plan.key)
    with _cancelled_by_sigterm():
        async with _lease(owner):
            return await _Shard(plan, shard, player, tasks, store, grade, owner, Meter(shard, progress)).run()


class _Shard:
    """Groups in flight of one worker."""

    def __init__(
        self,
        plan: RolloutPlan,
        shard: int,
        player: Player,
        tasks: Mapping[str, Task],
        store: Store,
        grade: Grade,
        owner: ClaimOwner,
        meter: Meter,
    ) -> None:
        self._plan, self._shard, self._player, self._tasks = plan, shard, player, tasks
        self._store, self._grade, self._owner, self._meter = store, grade, owner, meter
        self._groups, self._reserve = plan.shard(shard)
        self._found = self._infra_errors = self._refills = 0

    async def run(self) -> ShardReport:
        try:
            async with asyncio.TaskGroup() as running:
                for group in self._groups:
                    self._start(group, running)
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        meter = self._meter
        return ShardReport(
            self._shard,
            meter.groups_done,
            self._found,
            self._refills,
            meter.episodes_played,
            meter.tokens,
            self._infra_errors,
            meter.seconds,
        )

    def _start(self, group: GroupPlan, running: asyncio.TaskGroup) -> None:
        self._meter.expect(1, self._plan.config.episodes_started)
        running.create_task(self._run_group(group, running))

    async def _run_group(self, group: GroupPlan, running: asyncio.TaskGroup) -> None:
        artifact = await self._found_or_claimed(group)
        if artifact is None:
            failpoint("group-claimed")
            artifact = await self._sample(group)
            self._meter.group()
        else:
            self._found += 1
            self._meter.group(found_episodes=self._plan.config.episodes_started)
        self._infra_errors += artifact.meta["infra_errors"]
        if self._plan.config.refill and self._reserve and without_variance(artifact):
            self._refills += 1
            self._start(self._reserve.pop(0), running)

    async def _found_or_claimed(self, group: GroupPlan) -> Artifact | None:
        """Committed group, or None once this worker has claimed it. Waits while another live worker holds it."""
        while True:
            found = await asyncio.to_thread(find_group, self._plan, group, self._store)
            if found is None and await asyncio.to_thread(self._owner.claim, group.group_id):
                # its last owner may have committed it between the two questions
                return await asyncio.to_thread(find_group, self._plan, group, self._store)
            if found is not None:
                return found
            await asyncio.sleep(CLAIM_POLL_S)

    async def _sample(self, group: GroupPlan) -> Artifact:
        task = self._tasks[group.task_id]
        episodes = await sample_group(self._player, self._plan, group, task, self._meter.episode)
        if all(episode.outcome is Outcome.INFRA_ERROR for episode in episodes):
            raise InfraFault(
                f"group {group.index} (task {group.task_id}) lost all {len(episodes)} episodes to infrastructure"
                " faults, see the log: check engine and envd, then run the worker again"
            )
        solved = await asyncio.gather(*(self._verdict(task, episode) for episode in episodes))
        failpoint("group-sampled")
        committed = await asyncio.to_thread(commit_group, self._plan, group, episodes, solved, self._store)
        failpoint("group-committed")
        return committed

    async def _verdict(self, task: Task, episode: Episode) -> bool | None:
        """Early verdict for refills and the bias of over-sampling; rewards reuse it."""
        config = self._plan.config
        if not (config.refill or config.oversample) or episode.outcome in (Outcome.INFRA_ERROR, *STRAGGLERS):
            return None
        if episode.outcome is Outcome.FAILED:
            return False
        solved = (await self._grade(task, episode.final_diff)).solved
        if solved is None and config.refill and config.profile == "deterministic":
            raise InfraFault(
                f"an episode of task {task.task_id} could not be graded, which the refill decision requires: check"
                " envd, then run the same step again; committed groups stay"
            )
        return solved


async def _check(plan: RolloutPlan, shard: int, engine: Engine, tasks: Mapping[str, Task]) -> None:
    groups, reserve = plan.shard(shard)
    unknown = sorted({group.task_id for group in (*groups, *reserve)} - set(tasks))
    if unknown:
        raise PlanError(
            f"the task suite lacks {unknown[0]} and {len(unknown) - 1} more tasks of the plan: pass the suite that the"
            " prompts were drawn from"
        )
    served = await engine.version()
    if served != plan.policy.digest:
        raise StaleVersion(
            f"engine serves policy {served[:12]}, the plan asks for {plan.policy.short}: load that checkpoint before"
            " sampling"
        )


@asynccontextmanager
async def _lease(owner: ClaimOwner) -> AsyncIterator[None]:
    """Hold the owner's lease, renewed three times in each lease time. Leaving the block gives up its claims."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(owner.lease_s / 3)
            await asyncio.to_thread(owner.renew)

    await asyncio.to_thread(owner.renew)
    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        owner.end()


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Cancel the current task on SIGTERM if nobody else handles the signal."""
    task = asyncio.current_task()
    unhandled = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if task is None or not unhandled:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
