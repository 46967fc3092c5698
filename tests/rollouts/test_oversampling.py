from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_script import GraderByDiff, ScriptedEngine, make_plan, make_tasks, read_then_maybe_fix

from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, Outcome
from contracts.store import LocalStore
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from inference.rollouts.groups import find_group
from inference.rollouts.merge import merge_groups
from inference.rollouts.oversampling import select
from inference.rollouts.worker import run_shard


def episode(sample: int, lost: bool) -> Episode:
    return Episode(
        f"e{sample}",
        "g",
        "t",
        "",
        "",
        sample,
        0,
        0,
        "v",
        1.0,
        9,
        Outcome.INFRA_ERROR if lost else Outcome.COMPLETED,
        1,
        [],
        0,
        b"",
        [],
    )


ARRIVALS = st.permutations(list(range(10))).flatmap(
    lambda order: st.tuples(st.just(order), st.lists(st.booleans(), min_size=10, max_size=10))
)


@given(ARRIVALS, st.integers(1, 10))
def test_selection_by_sample_ignores_arrival_and_avoids_infra_errors(
    arrivals: tuple[list[int], list[bool]], size: int
) -> None:
    order, lost = arrivals
    kept = [found.sample for found in select([episode(place, lost[place]) for place in order], size, "deterministic")]
    good = [place for place in range(10) if not lost[place]][:size]
    assert kept == sorted(kept) and len(kept) == size
    assert set(good) <= set(kept)
    assert kept == [found.sample for found in select([episode(i, lost[i]) for i in range(10)], size, "deterministic")]


@given(ARRIVALS, st.integers(1, 10))
def test_selection_by_arrival_keeps_the_first_usable(arrivals: tuple[list[int], list[bool]], size: int) -> None:
    order, lost = arrivals
    kept = {found.sample for found in select([episode(place, lost[place]) for place in order], size, "throughput")}
    assert {place for place in order if not lost[place]} & kept == set([p for p in order if not lost[p]][:size])


def test_throughput_aborts_the_samples_that_come_late_and_leaves_a_row_of_each_but_no_sandbox(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    tasks, store = make_tasks(1), LocalStore(tmp_path)
    plan = make_plan(tasks, 1, group_size=2, oversample=4, profile="throughput", refill=False)

    async def run() -> int:
        async with OperationsClient(envd.address) as client:
            engine = ScriptedEngine(tokenizer, read_then_maybe_fix, delay_s=0.3)
            await run_shard(
                plan,
                0,
                engine=engine,
                sandboxes=client,
                tokenizer=tokenizer,
                tasks=tasks,
                store=store,
                grader=GraderByDiff(),
            )
            return (await client.info()).live

    assert asyncio.run(run()) == 0
    group = find_group(plan, plan.groups[0], store)
    assert group is not None
    rows = group.table("episodes.parquet").to_pylist()
    assert [row["sample"] for row in rows] == list(range(6))
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("completed") == 2 and outcomes.count("aborted") + outcomes.count("dropped") == 4
    assert (group.meta["episodes"], group.meta["stragglers"]) == (6, 4)
    sequences = {row["episode_id"]: row["token_role"] for row in group.table("sequences.parquet").to_pylist()}
    assert {row["episode_id"]: row["policy_tokens"] for row in rows} == {
        episode: roles.count(1) for episode, roles in sequences.items()
    }
    rollouts = merge_groups(plan, store)
    facts = rollouts.meta
    assert facts["stragglers"] == 4 and facts["solve_rate_highest"] - facts["solve_rate_lowest"] == pytest.approx(4 / 6)
    assert facts["solve_rate_lowest"] <= facts["solve_rate_estimated"] <= facts["solve_rate_highest"]
    assert [solved is None for solved in group.meta["solved"]] == [outcome != "completed" for outcome in outcomes]
