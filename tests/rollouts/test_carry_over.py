from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_script import FIX, POLICY, GraderByDiff, ScriptedEngine, call, make_plan, make_tasks

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import Episode, Outcome, TokenRole, TokenSequence, read_episodes
from contracts.routing import encode_routes
from contracts.store import LocalStore
from contracts.supports import encode_supports, supports_of
from contracts.tasks import Task
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.engines.base import Completion, SamplingParams
from inference.rollouts.carry_over import UNFINISHED, Quota, carried_groups, read_unfinished
from inference.rollouts.config import RolloutConfig
from inference.rollouts.merge import merge_groups
from inference.rollouts.plan import CARRIED_OVER, GroupPlan, RolloutPlan, draw_prompts
from inference.rollouts.transcript import Transcript
from inference.rollouts.worker import ShardReport, run_shard

TASKS = make_tasks(12)
LONG_TURNS = 10
NEXT = ArtifactRef(kind="checkpoint", key="e" * 64, digest="f" * 64)


class UnevenEngine(ScriptedEngine):
    """Plays long episodes for some seeds and short ones for the others.

    Short ones wait until a long one has taken three turns; from then on each turn of a long one takes `turn_s`.
    """

    def __init__(self, tokenizer: ChatTokenizer, version: str, look: ToolCallText, turn_s: float = 0.3) -> None:
        super().__init__(tokenizer, self._turns)
        self._version, self._look, self._turn_s = version, look, turn_s
        self.long: set[int] = set()
        self.sampled = 0
        self._begun = asyncio.Event()

    def _turns(self, turn: int, seed: int) -> Sequence[ToolCallText] | str:
        last = LONG_TURNS if seed in self.long else 1
        if turn == 0:
            return [call("edit", path="m.py", line=1, new=f"def f(): return {2 + seed % 2}")]
        return "done" if turn >= last else [self._look]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if params.seed in self.long:
            if list(prompt_ids).count(self._tokenizer.call_end) >= 3:
                self._begun.set()
                await asyncio.sleep(self._turn_s)
        elif self.long:
            await self._begun.wait()
        found = await super().generate(prompt_ids, params)
        self.sampled += len(found.token_ids)
        return found


READ = call("read", path="m.py")
CLOCK = call("exec", command="date +%N")


def first_plan(needed: int, more: int, **config: Any) -> RolloutPlan:
    settings = {
        "group_size": 2,
        "profile": "throughput",
        "carry_over": more,
        "max_turns": LONG_TURNS + 2,
        "max_tokens": 4000,
        "refill": False,
        **config,
    }
    return make_plan(TASKS, needed + more, **settings).model_copy(update={"needed": needed})


def next_plan(before: RolloutPlan, store: LocalStore, iteration: str, key: str) -> RolloutPlan:
    """Plan of the iteration after `before`, as ops.inputs makes it."""
    unfinished = find_artifact(store, UNFINISHED, before.key)
    assert unfinished is not None
    carried = carried_groups(unfinished, {task.task_id: task.digest for task in TASKS.values()})
    needed = before.needed or 0
    groups, _, _ = draw_prompts(
        sorted(TASKS),
        count=needed + before.config.carry_over,
        reserve=0,
        cursor=len(before.groups),
        seed=5,
        iteration=iteration,
        carried=carried,
    )
    changed = {
        "iteration": iteration,
        "key": key * 64,
        "policy": NEXT,
        "groups": groups,
        "reserve": [],
        "inputs": {CARRIED_OVER: unfinished.ref},
    }
    return RolloutPlan.model_validate({**before.model_dump(), **changed})


def play(plan: RolloutPlan, store: LocalStore, envd: LocalEnvd, engine: UnevenEngine, shard: int = 0) -> ShardReport:
    async def run() -> ShardReport:
        async with SandboxClient(envd.address) as client:
            return await run_shard(
                *(plan, shard),
                engine=engine,
                sandboxes=client,
                tokenizer=engine._tokenizer,
                tasks=TASKS,
                store=store,
                grader=GraderByDiff(),
            )

    return asyncio.run(run())


def make_long(engine: UnevenEngine, plan: RolloutPlan, groups: Sequence[GroupPlan]) -> None:
    """Make the second episode of these groups a long one."""
    engine.long |= {plan.slot(group, 1).token_seed for group in groups}


def episodes(artifact: Artifact) -> dict[tuple[str, int], Episode]:
    found = read_episodes(artifact.table("episodes.parquet"), artifact.table("sequences.parquet"))
    return {(each.group_id, each.sample): each for each in found}


def test_a_long_episode_goes_on_where_it_stopped_with_the_next_policy(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store, plan = LocalStore(tmp_path), first_plan(3, 1)
    engine = UnevenEngine(tokenizer, POLICY.digest, READ)
    slow = plan.groups[1]
    make_long(engine, plan, [slow])
    report = play(plan, store, envd, engine)
    merged = merge_groups(plan, store)
    unfinished = find_artifact(store, UNFINISHED, plan.key)
    assert unfinished is not None
    left = read_unfinished(unfinished)
    assert merged.meta["groups"] == 3 and merged.meta["groups_carried_over"] == 1 and set(left) == {slow.group_id}
    before = left[slow.group_id][1]
    assert (before.outcome, left[slow.group_id][0].outcome) == (Outcome.UNFINISHED, Outcome.COMPLETED)
    assert 0 < before.turns < LONG_TURNS and before.sequences[0].token_role[-1] == TokenRole.ENVIRONMENT
    sampled = sum(each.policy_tokens for each in (*episodes(merged).values(), *left[slow.group_id].values()))
    assert sampled == engine.sampled == report.tokens, "no sampled token is lost"

    later = next_plan(plan, store, "0002", "b").model_copy(update={"needed": None})
    following = UnevenEngine(tokenizer, NEXT.digest, READ, turn_s=0)
    following.long = engine.long
    report = play(later, store, envd, following)
    found = episodes(merge_groups(later, store))
    after = found[slow.group_id, 1]
    old, new = before.sequences[0], after.sequences[0]
    assert after.outcome is Outcome.COMPLETED and after.turns == LONG_TURNS + 1
    assert after.episode_id == before.episode_id and after.seed == before.seed
    for ours, theirs in (
        (old.token_ids, new.token_ids),
        (old.token_role, new.token_role),
        (old.logprobs, new.logprobs),
    ):
        assert theirs[: len(ours)] == ours
    assert new.policy_spans[: len(old.policy_spans)] == old.policy_spans
    assert {version for version, _, _ in new.policy_spans} == {POLICY.digest, NEXT.digest}
    assert [each.turn for each in after.tool_calls] == list(range(LONG_TURNS))
    assert b"+def f(): return" in after.final_diff, "the edit of its first turn was made again"
    ended = replace(left[slow.group_id][0], telemetry={})
    assert found[slow.group_id, 0] == ended, "the other one of its group is as it was"
    ours = sum(each.policy_tokens for each in found.values())
    assert report.tokens == following.sampled == ours - sum(each.policy_tokens for each in left[slow.group_id].values())


def test_an_episode_whose_calls_are_answered_otherwise_begins_anew(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    store, plan = LocalStore(tmp_path), first_plan(2, 1)
    engine = UnevenEngine(tokenizer, POLICY.digest, CLOCK)
    make_long(engine, plan, plan.groups[:1])
    play(plan, store, envd, engine)
    merge_groups(plan, store)
    later = next_plan(plan, store, "0002", "b").model_copy(update={"needed": None})
    following = UnevenEngine(tokenizer, NEXT.digest, CLOCK, turn_s=0)
    following.long = engine.long
    play(later, store, envd, following)
    after = episodes(merge_groups(later, store))[plan.groups[0].group_id, 1]
    assert {version for version, _, _ in after.sequences[0].policy_spans} == {NEXT.digest}
    assert after.outcome is Outcome.COMPLETED and after.turns == LONG_TURNS + 1
    assert "not answered as they were" in caplog.text and "tokens are lost" in caplog.text


def test_a_group_is_waited_for_once_it_was_carried_over_often_enough(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store, plan = LocalStore(tmp_path), first_plan(2, 1, max_carries=2, max_turns=80, max_tokens=20_000)
    seeds: set[int] = set()
    group_id = plan.groups[0].group_id
    carried = []
    for iteration, key in (("0002", "b"), ("0003", "c"), ("0004", None)):
        engine = UnevenEngine(tokenizer, plan.policy.digest, READ)
        make_long(engine, plan, [each for each in plan.groups if each.group_id == group_id])
        seeds |= engine.long
        play(plan, store, envd, engine)
        merged = merge_groups(plan, store)
        carried.append(merged.meta.get("groups_carried_over", 0))
        done = {group for group, _ in episodes(merged)}
        assert (group_id in done) is (key is None)
        if key is not None:
            plan = next_plan(plan, store, iteration, key)
            assert [each.carried.times for each in plan.groups if each.carried and each.group_id == group_id] == [
                len(carried)
            ]
    assert len(seeds) == 1, "its seed is that of the iteration that drew it"
    assert carried[:2] == [1, 1]


def test_two_shards_share_what_is_needed_and_a_killed_one_goes_on(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store = LocalStore(tmp_path)
    plan = first_plan(5, 3).model_copy(update={"workers": 2})
    assert [plan.needed_of(shard) for shard in range(2)] == [3, 2]
    for shard in range(2):
        engine = UnevenEngine(tokenizer, POLICY.digest, READ)
        make_long(engine, plan, plan.groups[:2])
        play(plan, store, envd, engine, shard)
        again = UnevenEngine(tokenizer, POLICY.digest, READ)
        assert play(plan, store, envd, again, shard).groups_found == 4 and not again.sampled
    merged = merge_groups(plan, store)
    assert merged.meta["groups"] >= 5 and merged.meta["groups"] + merged.meta["groups_carried_over"] == 8
    assert {plan.groups[0].group_id, plan.groups[1].group_id}.isdisjoint({group for group, _ in episodes(merged)})


def test_a_group_without_variance_is_needed_once_more(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    class Same(UnevenEngine):
        def _turns(self, turn: int, seed: int) -> Sequence[ToolCallText] | str:
            return "done" if turn else [call("edit", path="m.py", line=1, new="def f(): return 2")]

    store = LocalStore(tmp_path)
    plan = first_plan(2, 1, refill=True)
    groups, reserve = plan.groups, make_plan(TASKS, 3, 2).reserve
    plan = plan.model_copy(update={"groups": groups, "reserve": reserve})
    play(plan, store, envd, Same(tokenizer, POLICY.digest, READ))
    merged = merge_groups(plan, store)
    assert merged.meta["groups"] >= 4 and merged.meta["without_variance"] == merged.meta["groups"]
    assert all(FIX in each.final_diff for each in episodes(merged).values())


@given(st.integers(1, 6), st.lists(st.booleans(), max_size=12), st.sets(st.integers(0, 11)))
def test_a_quota_stops_when_enough_are_complete_and_none_is_waited_for(
    needed: int, refilled: list[bool], waited: set[int]
) -> None:
    stopping = asyncio.Event()
    quota = Quota(needed, [str(each) for each in waited], stopping)
    for number, each in enumerate(refilled):
        quota.completed(str(number), each)
        enough = refilled[: number + 1].count(False) >= needed and all(other <= number for other in waited)
        assert stopping.is_set() >= enough
    if stopping.is_set():
        assert refilled.count(False) >= needed and all(other < len(refilled) for other in waited)
    unlimited = Quota(None, [], stopping := asyncio.Event())
    unlimited.completed("0", False)
    assert not stopping.is_set()


def test_a_carried_transcript_keeps_routing_and_supports() -> None:
    routes = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2)
    allowed = supports_of([None, None, np.array([True, False, True]), None])
    recorded = TokenSequence(
        [0, 1, 2, 3],
        [0, 0, 1, 2],
        [None, None, -0.5, None],
        [("v", 2, 3)],
        encode_routes(routes),
        encode_supports(allowed),
    )
    transcript = Transcript.of(recorded)
    assert transcript.routed == 3 and transcript.sequence() == recorded
    more = Completion([5], [-0.25], [("w", 0, 1)], "stop", routed_experts=routes[:1], supports=supports_of([None]))
    transcript.add_policy(more)
    after = transcript.sequence()
    assert after.token_ids == [0, 1, 2, 3, 5] and after.policy_spans == [("v", 2, 3), ("w", 4, 5)]
    assert recorded.token_ids == [0, 1, 2, 3], "the record is not written to"


def test_groups_that_have_not_begun_are_carried_over_too(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    store, plan = LocalStore(tmp_path), first_plan(2, 6, concurrency=1)
    engine = UnevenEngine(tokenizer, POLICY.digest, READ)
    play(plan, store, envd, engine)
    merge_groups(plan, store)
    unfinished = find_artifact(store, UNFINISHED, plan.key)
    assert unfinished is not None
    left = read_unfinished(unfinished)
    assert any(each.turns == 0 for group in left.values() for each in group.values())
    assert all(sorted(group) == [0, 1] for group in left.values())
    later = next_plan(plan, store, "0002", "b").model_copy(update={"needed": None})
    play(later, store, envd, UnevenEngine(tokenizer, NEXT.digest, READ))
    found = episodes(merge_groups(later, store))
    assert {group for group, _ in found} >= set(left)
    assert {each.outcome for each in found.values()} == {Outcome.COMPLETED}


def test_tasks_that_changed_are_not_carried_over(tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    store, plan = LocalStore(tmp_path), first_plan(2, 1)
    engine = UnevenEngine(tokenizer, POLICY.digest, READ)
    make_long(engine, plan, plan.groups[:1])
    play(plan, store, envd, engine)
    merge_groups(plan, store)
    unfinished = find_artifact(store, UNFINISHED, plan.key)
    assert unfinished is not None
    task: Task = TASKS[plan.groups[0].task_id]
    assert carried_groups(unfinished, {task.task_id: "0" * 64}) == []
    (kept,) = carried_groups(unfinished, {task.task_id: task.digest})
    assert kept.carried is not None and (kept.index, kept.carried.iteration, kept.carried.times) == (0, "0001", 1)


def test_settings_that_contradict_carry_over_are_refused_by_name() -> None:
    for wrong, said in (({"profile": "deterministic"}, "carry_over"), ({"oversample": 2}, "oversample")):
        with pytest.raises(ValueError, match=said):
            RolloutConfig.model_validate({"profile": "throughput", "carry_over": 1, **wrong})
    assert "carry_over" not in RolloutConfig().model_dump(), "action keys stay as they are without it"
