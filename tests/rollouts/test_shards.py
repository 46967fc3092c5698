from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rollouts_script import (
    GraderByDiff,
    ScriptedEngine,
    call,
    make_plan,
    make_tasks,
    play_evaluation,
    read_then_maybe_fix,
)

from contracts.artifacts import Artifact, list_artifacts
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import read_episodes
from contracts.errors import InfraFault
from contracts.store import LocalStore
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.errors import GroupsMissing, PlanError, RolloutError, StaleVersion
from inference.rollouts.claims import ClaimOwner
from inference.rollouts.episode import Player
from inference.rollouts.merge import gather_groups, merge_groups
from inference.rollouts.plan import RolloutPlan
from inference.rollouts.progress import ShardProgress
from inference.rollouts.worker import ShardReport, run_shard

TASKS = make_tasks(40)
ROOT = Path(__file__).parents[2]


def sample(
    plan: RolloutPlan,
    store: LocalStore,
    envd: LocalEnvd,
    engine: ScriptedEngine,
    tokenizer: ChatTokenizer,
    shards: Sequence[int],
    seen: list[ShardProgress] | None = None,
) -> list[ShardReport]:
    async def run() -> list[ShardReport]:
        async with SandboxClient(envd.address) as client:
            working = [
                run_shard(
                    plan,
                    shard,
                    engine=engine,
                    sandboxes=client,
                    tokenizer=tokenizer,
                    tasks=TASKS,
                    store=store,
                    grader=GraderByDiff(),
                    progress=(seen if seen is not None else []).append,
                )
                for shard in shards
            ]
            return await asyncio.gather(*working)

    return asyncio.run(run())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_rollouts_are_the_same_in_any_order_and_concurrency(
    workers: int, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan = make_plan(TASKS, 4, 4, workers, group_size=2)
    digests = []
    for attempt, delay in enumerate((0.0, 0.05)):
        store = LocalStore(tmp_path / str(attempt))
        engine = ScriptedEngine(tokenizer, read_then_maybe_fix, delay_s=delay)
        for shard in sorted(range(workers), reverse=bool(attempt)):
            sample(plan, store, envd, engine, tokenizer, [shard])
        digests.append(merge_groups(plan, store).ref.digest)
    assert digests[0] == digests[1]


def test_without_refills_the_content_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    digests = set()
    for workers in (1, 3):
        plan, store = make_plan(TASKS, 4, 2, workers, refill=False), LocalStore(tmp_path / str(workers))
        sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, range(workers))
        digests.add(merge_groups(plan, store).ref.digest)
    assert len(digests) == 1


def test_an_engine_without_routing_is_refused_before_an_episode_begins(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan, store = make_plan(TASKS, 1, record_routing=True), LocalStore(tmp_path)
    engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
    with pytest.raises(RolloutError, match="record_routing is true, but the engine returns no routed experts"):
        sample(plan, store, envd, engine, tokenizer, [0])
    assert engine.requests == 1


def test_an_engine_without_supports_is_refused_before_an_episode_begins(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan, store = make_plan(TASKS, 1, top_p=0.9), LocalStore(tmp_path)
    engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
    with pytest.raises(RolloutError, match="engine does not return what tokens were drawn from"):
        sample(plan, store, envd, engine, tokenizer, [0])
    assert engine.requests == 1


def test_merged_rows_round_trip_and_stand_in_order(tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    plan, store, seen = make_plan(TASKS, 3, refill=False), LocalStore(tmp_path), []
    (report,) = sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [0], seen)
    rollouts = merge_groups(plan, store)
    episodes = read_episodes(rollouts.table("episodes.parquet"), rollouts.table("sequences.parquet"))
    assert [(episode.task_id, episode.sample) for episode in episodes] == [
        (group.task_id, sample) for group in plan.groups for sample in range(4)
    ]
    assert (report.groups, report.episodes, report.groups_found) == (3, 12, 0)
    assert (seen[-1].groups_done, seen[-1].groups_total) == (3, 3)
    assert seen[-1].tokens == report.tokens == sum(episode.policy_tokens for episode in episodes)
    assert rollouts.meta["policy_tokens"] == report.tokens
    assert RolloutPlan.model_validate(rollouts.json("plan.json")) == plan
    assert store.list("pointers/") == [], "claims of finished rollouts are cleared"
    ClaimOwner(store, plan.key).renew()
    assert merge_groups(plan, store).ref == rollouts.ref
    assert store.list("pointers/") == [], "those that a killed merge left, too"


def test_committed_groups_are_never_sampled_again(tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    plan, store = make_plan(TASKS, 4, 4, group_size=2), LocalStore(tmp_path)
    sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [0])
    idle = ScriptedEngine(tokenizer, read_then_maybe_fix)
    (report,) = sample(plan, store, envd, idle, tokenizer, [0])
    assert (idle.requests, report.episodes, report.groups) == (0, 0, report.groups_found)


def test_two_workers_on_one_shard_share_it_without_sampling_a_group_twice(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan, store = make_plan(TASKS, 4, refill=False), LocalStore(tmp_path)
    reports = sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [0, 0])
    assert sum(report.episodes for report in reports) == 16
    assert [report.groups for report in reports] == [4, 4]


def test_groups_without_variance_take_the_reserve_until_enough_differ(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    def never(turn: int, seed: int) -> Sequence[ToolCallText] | str:
        return [[call("read", path="m.py")], "done"][turn]

    plan, store = make_plan(TASKS, 3, 2, group_size=2), LocalStore(tmp_path)
    (report,) = sample(plan, store, envd, ScriptedEngine(tokenizer, never), tokenizer, [0])
    assert (report.groups, report.refills) == (5, 2)
    assert merge_groups(plan, store).meta["without_variance"] == 5


def test_a_merge_names_the_groups_that_are_missing(tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    plan, store = make_plan(TASKS, 4, workers=2, refill=False), LocalStore(tmp_path)
    sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [1])
    missing = [group.task_id for group in plan.groups if group.index % 2 == 0]
    assert [group.task_id for group in gather_groups(plan, store).missing] == missing
    with pytest.raises(GroupsMissing, match=rf"lack 2 of 4 groups: 0 \({missing[0]}\), 2 \({missing[1]}\)"):
        merge_groups(plan, store)


def run_worker(plan: RolloutPlan, store: Path, envd: LocalEnvd) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).parent / "rollouts_worker.py", store, envd.address, plan.model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )


def groups_in(store: Path) -> list[Artifact]:
    return list(list_artifacts(LocalStore(store), "group"))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_worker_that_runs_again_gives_the_same_rollouts(
    how: signal.Signals, tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan = make_plan(TASKS, 40, 4, group_size=2, concurrency=3)
    undisturbed = LocalStore(tmp_path / "undisturbed")
    sample(plan, undisturbed, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [0])
    worker, deadline = run_worker(plan, tmp_path / "killed", envd), time.monotonic() + 30
    while len(groups_in(tmp_path / "killed")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    worker.send_signal(how)
    assert worker.wait(20) != 0
    survived = len(groups_in(tmp_path / "killed"))
    assert 2 <= survived < 40
    store = LocalStore(tmp_path / "killed")
    (report,) = sample(plan, store, envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, [0])
    assert report.groups_found == survived
    assert merge_groups(plan, store).ref == merge_groups(plan, undisturbed).ref


@pytest.mark.parametrize(
    ("profile", "message"), [("deterministic", "nobody there; gave up"), ("throughput", "lost all 4 episodes")]
)
def test_a_group_lost_to_infrastructure_is_not_committed(
    profile: str, message: str, tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    class Gone(ScriptedEngine):
        async def generate(self, prompt_ids: object, params: object) -> object:  # type: ignore[override]
            from inference.errors import EngineUnreachable

            raise EngineUnreachable("nobody there")

    plan, store = make_plan(TASKS, 1, max_attempts=1, profile=profile), LocalStore(tmp_path)
    envd = type("NoEnvd", (), {"address": "unix:/nowhere"})()
    with pytest.raises(InfraFault, match=message):
        sample(plan, store, envd, Gone(tokenizer, read_then_maybe_fix), tokenizer, [0])
    assert groups_in(tmp_path) == []


def test_a_wrong_policy_or_suite_is_refused_before_sampling(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
    plan = make_plan(make_tasks(60), 50)
    with pytest.raises(PlanError, match="task suite lacks task-0"):
        sample(plan, LocalStore(tmp_path), envd, engine, tokenizer, [0])
    engine._version = "e" * 64
    with pytest.raises(StaleVersion, match="engine serves policy eeeeeeeeeeee"):
        sample(make_plan(TASKS, 1), LocalStore(tmp_path), envd, engine, tokenizer, [0])
    assert engine.requests == 0


def test_evaluation_episodes_come_in_order_with_seeds_that_name_no_policy(
    envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    def seeds(key: str, version: str) -> list[tuple[str, int, int]]:
        async def run() -> list[tuple[str, int, int]]:
            engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
            await engine.load_weights(Path(), version)
            async with SandboxClient(envd.address) as client:
                config = make_plan(TASKS, 1).config
                player = Player.of(engine, client, tokenizer, config, policy_version=version, key=key)
                found = await play_evaluation(player, list(TASKS.values())[:3], 2, seed=5)
            return [(episode.task_id, episode.sample, episode.seed) for episode in found]

        return asyncio.run(run())

    parent = seeds("1" * 64, "p" * 64)
    assert parent == seeds("2" * 64, "q" * 64)
    assert [row[:2] for row in parent] == [(f"task-00{task}", sample) for task in range(3) for sample in range(2)]
