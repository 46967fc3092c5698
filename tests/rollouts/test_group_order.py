"""Groups of tasks that took long begin first; what they come to does not depend on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rollouts_script import GraderByDiff, ScriptedEngine, make_plan, make_tasks, read_then_maybe_fix

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import Slot
from contracts.store import LocalStore
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from inference.engines.base import Completion, SamplingParams
from inference.rollouts.merge import merge_groups
from inference.rollouts.order import longest_first, seconds_of
from inference.rollouts.oversampling import Group
from inference.rollouts.worker import run_shard

TASKS = make_tasks(6)


def group(task_id: str) -> Group:
    return Group(f"g-{task_id}", TASKS[task_id], [Slot("e", "0000", "g", task_id, 0, 1)], 1)


def test_known_tasks_go_by_their_own_time_and_others_by_their_familys() -> None:
    names = list(TASKS)
    tasks = {name: replace(TASKS[name], family="slow" if place >= 4 else "fast") for place, name in enumerate(names)}
    groups = [replace(group(name), task=tasks[name]) for name in names]
    families = {name: task.family for name, task in tasks.items()}
    assert longest_first(groups, {}, families) == groups
    seconds = {names[0]: 1.0, names[1]: 3.0, names[4]: 9.0, "a task that left the suite": 2.0}
    ordered = [each.task.task_id for each in longest_first(groups, seconds, families)]
    assert ordered == [names[4], names[5], names[1], names[2], names[3], names[0]]


def makespan(seconds: Sequence[float], places: int) -> float:
    """End of the last job, each begun in order as soon as a place is free."""
    free = [0.0] * places
    for each in seconds:
        free.sort()
        free[0] += each
    return max(free)


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_first_end_within_a_third_of_the_best_possible(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.lognormvariate(0, 1) * (20 if chance.random() < 0.05 else 1) for _ in range(60)]
    names = [f"t{place}" for place in range(60)]
    groups = [replace(group(next(iter(TASKS))), task=replace(TASKS[next(iter(TASKS))], task_id=name)) for name in names]
    ordered = longest_first(groups, dict(zip(names, lengths, strict=True)), {})
    taken = makespan([lengths[names.index(each.task.task_id)] for each in ordered], 8)
    best = max(sum(lengths) / 8, max(lengths))
    assert taken <= 4 / 3 * best
    assert taken <= makespan(lengths, 8)


class NotingEngine(ScriptedEngine):
    """Notes the order in which prompts first arrive."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        super().__init__(tokenizer, read_then_maybe_fix)
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if tuple(prompt_ids) not in self.prompts:
            self.prompts.append(tuple(prompt_ids))
        return await super().generate(prompt_ids, params)


def test_a_worker_begins_with_the_longest_and_makes_the_same(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    plan = make_plan(TASKS, 6, group_size=2, concurrency=2, refill=False)

    def run(folder: str, seconds: dict[str, float]) -> tuple[Artifact, list[str]]:
        store, engine = LocalStore(tmp_path / folder), NotingEngine(tokenizer)

        async def play() -> None:
            async with OperationsClient(envd.address) as client:
                given = {"engine": engine, "sandboxes": client, "tokenizer": tokenizer, "tasks": TASKS, "store": store}
                await run_shard(plan, 0, **given, grader=GraderByDiff(), seconds=seconds)

        asyncio.run(play())
        begun = [
            next(name for name, task in TASKS.items() if task.instruction in tokenizer.decode(prompt))
            for prompt in engine.prompts
            if "<tool_response>" not in tokenizer.decode(prompt)
        ]
        return merge_groups(plan, store), begun

    plain, usual = run("plain", {})
    wanted = [each.task_id for each in plan.groups][::-1]
    other, begun = run("ordered", {name: 10.0 - place for place, name in enumerate(wanted)})
    assert usual == wanted[::-1]
    assert begun == wanted
    assert other.ref.digest == plain.ref.digest
    assert set(seconds_of([plain])) == set(wanted) and min(seconds_of([plain]).values()) > 0
