"""Worker of the fan-out: samples the groups of its shard and commits each as soon as it is complete.

claim -> sample -> grade -> commit, for all groups at once (inference.rollouts.runner); a group without variance
starts the next one of the reserve; with `rollouts.carry_over`, groups in excess are committed unfinished
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from contracts.artifacts import Artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import STRAGGLERS, Episode, Outcome
from contracts.errors import InfraFault, StoreError
from contracts.failpoints import failpoint
from contracts.store import Store
from contracts.tasks import Task
from envd.client import Limits, SandboxClient
from inference.engines.base import Engine, SamplingParams
from inference.errors import PlanError, RolloutError, StaleVersion
from inference.grammar import ANY_TEXT
from inference.rollouts.carry_over import Quota, read_unfinished, waited_for
from inference.rollouts.claims import ClaimOwner
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player
from inference.rollouts.groups import commit_group, find_group, is_complete, without_variance
from inference.rollouts.order import longest_first
from inference.rollouts.oversampling import Group, mark_dropped, spread
from inference.rollouts.plan import CARRIED_OVER, GroupPlan, RolloutPlan
from inference.rollouts.progress import Meter, Progress, no_progress
from inference.rollouts.runner import play_groups

_log = logging.getLogger(__name__)
CLAIM_POLL_S = 0.5


class Verdict(Protocol):
    """What the refill decision asks of a grade."""

    @property
    def solved(self) -> bool:
        """Whether the final state solves the task."""


class Grader(Protocol):
    """Grades final states. Injected: the verifier belongs to another plane."""

    async def grade(self, task: Task, diff: bytes) -> Verdict:
        """Verdict on a task's final diff. Raises InfraFault."""


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
    grader: Grader,
    progress: Progress = no_progress,
    limits: Limits = Limits(),
    seconds: Mapping[str, float] | None = None,
    vocabulary: int = 0,
) -> ShardReport:
    """Sample and commit every group of `shard`, refills included. seconds: of an episode, by task, as far as known; the
    longest begin first. vocabulary: see Player.vocabulary.

    Cancellation and SIGTERM close all sandboxes and keep what is committed.

    Raises PlanError for a task that `tasks` lacks, StaleVersion when the engine serves another policy than the plan's,
    RolloutError when it does not return the routing or supports that the plan asks for, and InfraFault when every
    episode of a group was lost to infrastructure: such a group is not committed.
    """
    await _check(plan, shard, engine, tasks)
    player = Player.of(
        *(engine, sandboxes, tokenizer, plan.config),
        policy_version=plan.policy.digest,
        key=plan.key,
        limits=limits,
        store=store,
        vocabulary=vocabulary,
    )
    owner, meter = ClaimOwner(store, plan.key), Meter(shard, progress)
    commits = _GroupCommits(plan, shard, tasks, store, grader, owner, player.stopping)
    with _cancelled_by_sigterm():
        async with holding(owner):
            families = {task.task_id: task.family for task in tasks.values()}
            ordered = longest_first(commits.planned, seconds or {}, families)
            ordered.sort(key=lambda group: not group.earlier)  # what was carried over comes first
            committed = await play_groups(player, ordered, commits, meter, commits.refill)
    return ShardReport(
        shard,
        meter.groups_done,
        meter.groups_found,
        len(committed) - len(commits.planned),
        meter.episodes_played,
        meter.tokens,
        sum(group.meta["infra_errors"] for group in committed),
        meter.seconds,
    )


class _GroupCommits:
    """Commits the groups of one shard as `group` artifacts, each claimed first."""

    def __init__(
        self,
        plan: RolloutPlan,
        shard: int,
        tasks: Mapping[str, Task],
        store: Store,
        grader: Grader,
        owner: ClaimOwner,
        stopping: asyncio.Event,
    ) -> None:
        self._plan, self._store, self._grader, self._owner = plan, store, grader, owner
        groups, reserve = plan.shard(shard)
        self._plans = {group.group_id: group for group in (*groups, *reserve)}
        carried = plan.inputs.get(CARRIED_OVER)
        earlier = read_unfinished(open_artifact(store, carried)) if carried else {}
        self.planned, self._reserve = (
            [_group(plan, each, tasks[each.task_id], earlier.get(each.group_id, {})) for each in part]
            for part in (groups, reserve)
        )
        self._quota = Quota(plan.needed_of(shard), waited_for(plan, groups), stopping)

    async def find(self, group: Group) -> Artifact | None:
        """Committed group, or None once this worker has claimed it. Waits while another live worker holds it."""
        while True:
            found = await self._committed(group)
            if found is None and await asyncio.to_thread(self._owner.claim, group.group_id):
                # its last owner may have committed it between the two questions
                found = await self._committed(group)
                if found is None:
                    failpoint("group-claimed")
                return found
            if found is not None:
                return found
            await asyncio.sleep(CLAIM_POLL_S)

    async def commit(self, group: Group, episodes: list[Episode]) -> Artifact:
        """See Commits.commit. Raises InfraFault when every episode was lost to infrastructure."""
        plan = self._plans[group.group_id]
        if all(episode.outcome is Outcome.INFRA_ERROR for episode in episodes):
            raise InfraFault(
                f"group {plan.index} (task {plan.task_id}) lost all {len(episodes)} episodes to infrastructure"
                " faults, see the log: check engine and envd, then run the worker again"
            )
        finished = all(episode.outcome is not Outcome.UNFINISHED for episode in episodes)
        graded = (self._verdict(group.task, episode) for episode in episodes)
        solved = await asyncio.gather(*graded) if finished else [None] * len(episodes)
        if self._plan.config.kept_by == "spread":
            episodes = mark_dropped(episodes, spread(episodes, solved, group.keep))
        failpoint("group-sampled")
        committed = await asyncio.to_thread(commit_group, self._plan, plan, episodes, solved, self._store)
        failpoint("group-committed")
        return committed

    def refill(self, committed: Artifact) -> Group | None:
        """Next group of the reserve for one without variance."""
        wanted = bool(self._plan.config.refill and self._reserve and without_variance(committed))
        if is_complete(committed):
            self._quota.completed(committed.manifest.config["group_id"], refilled=wanted)
        return self._reserve.pop(0) if wanted else None

    async def _committed(self, group: Group) -> Artifact | None:
        return await asyncio.to_thread(find_group, self._plan, self._plans[group.group_id], self._store)

    async def _verdict(self, task: Task, episode: Episode) -> bool | None:
        """Early verdict for refills and the bias of over-sampling; rewards reuse it. None: there is none."""
        config = self._plan.config
        if not (config.refill or config.oversample) or episode.outcome in (Outcome.INFRA_ERROR, *STRAGGLERS):
            return None
        if episode.outcome is Outcome.FAILED:
            return False
        try:
            return (await self._grader.grade(task, episode.final_diff)).solved
        except InfraFault as fault:
            if (config.refill or config.kept_by == "spread") and config.profile == "deterministic":
                raise InfraFault(
                    f"an episode of task {task.task_id} could not be graded, which the choice of episodes and groups"
                    " requires: check envd, then run the same step again; committed groups stay"
                ) from fault
            return None


def _group(plan: RolloutPlan, group: GroupPlan, task: Task, earlier: Mapping[int, Episode]) -> Group:
    slots = [plan.slot(group, sample) for sample in range(plan.config.episodes_started)]
    return Group(group.group_id, task, slots, plan.config.group_size, earlier)


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
    if plan.config.record_routing:
        await _require_routing(engine)
    if plan.config.restrictions:
        await _require_supports(engine, plan.config)


async def _require_routing(engine: Engine) -> None:
    """Raise RolloutError unless the engine returns the routed experts of a token."""
    completion = await engine.generate([0], SamplingParams(0.0, 1, 0, routing_from=0))
    if completion.routed_experts is None:
        raise RolloutError(
            "rollouts.record_routing is true, but the engine returns no routed experts: use the built-in engine, or"
            " vLLM 0.32 or newer with engine.flags [--enable-return-routed-experts]"
        )


async def _require_supports(engine: Engine, config: RolloutConfig) -> None:
    """Raise RolloutError unless the engine returns what a token was drawn from."""
    grammar = ANY_TEXT if config.grammar else None
    completion = await engine.generate([0], SamplingParams(1.0, 1, 0, (0,), top_p=config.top_p, grammar=grammar))
    if completion.supports is None:
        raise RolloutError(
            f"rollouts.{' and '.join(sorted(config.restrictions))} is set, but the engine does not return what tokens"
            " were drawn from: use the built-in engine"
        )


@asynccontextmanager
async def holding(owner: ClaimOwner) -> AsyncIterator[None]:
    """Hold the owner's lease, renewed three times in each lease time. Leaving the block gives up its claims.

    A renewal may fail: without the later ones, other workers would sample the same groups.
    """

    async def keep() -> None:
        while True:
            await asyncio.sleep(owner.lease_s / 3)
            try:
                await asyncio.to_thread(owner.renew)
            except StoreError as error:
                _log.warning("the lease on the groups of a shard was not renewed: %s", error)

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
