from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_script import GraderByDiff, ScriptedEngine, make_plan, make_tasks, read_then_maybe_fix

from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, Outcome, TokenSequence
from contracts.store import LocalStore
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from inference.rollouts.groups import find_group
from inference.rollouts.merge import merge_groups
from inference.rollouts.oversampling import select, spread
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
    kept = [found.sample for found in select([episode(place, lost[place]) for place in order], size, "index")]
    good = [place for place in range(10) if not lost[place]][:size]
    assert kept == sorted(kept) and len(kept) == size
    assert set(good) <= set(kept)
    assert kept == [found.sample for found in select([episode(i, lost[i]) for i in range(10)], size, "index")]


@given(ARRIVALS, st.integers(1, 10))
def test_selection_by_arrival_keeps_the_first_usable(arrivals: tuple[list[int], list[bool]], size: int) -> None:
    order, lost = arrivals
    kept = {found.sample for found in select([episode(place, lost[place]) for place in order], size, "first")}
    assert {place for place in order if not lost[place]} & kept == set([p for p in order if not lost[p]][:size])


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=14), st.integers(1, 10))
def test_spread_keeps_the_subset_whose_verdicts_vary_most(verdicts: list[bool | None], size: int) -> None:
    rows = [episode(place, verdict is None) for place, verdict in enumerate(verdicts)]
    chosen = [each.sample for each in spread(rows, verdicts, size)]
    assert chosen == sorted(set(chosen)) and len(chosen) == min(size, len(rows))
    graded = [int(bool(verdicts[place])) for place in chosen if verdicts[place] is not None]
    known = [int(verdict) for verdict in verdicts if verdict is not None]
    assert len(graded) == min(size, len(known)), "an ungraded one only if there are no others"
    if graded:
        best = max(pvariance(each) for each in combinations(known, len(graded)))
        assert pvariance(graded) == pytest.approx(best)


def test_the_shortest_are_kept_whatever_the_order_of_arrival() -> None:
    lengths = [7, 3, 9, 3, 5]
    rows = [
        replace(episode(place, place == 1), sequences=[TokenSequence([0] * count, [1] * count, [0.0] * count, [])])
        for place, count in enumerate(lengths)
    ]
    for order in permutations(rows):
        assert [each.sample for each in select(order, 3, "shortest")] == [0, 3, 4]


@pytest.mark.parametrize("profile", ["deterministic", "throughput"])
def test_spread_grades_all_and_drops_by_verdict(
    tmp_path: Path, envd: LocalEnvd, tokenizer: ChatTokenizer, profile: str
) -> None:
    tasks, store = make_tasks(2), LocalStore(tmp_path)
    plan = make_plan(tasks, 2, group_size=2, oversample=6, profile=profile, keep="spread", refill=False)

    async def run() -> None:
        async with OperationsClient(envd.address) as client:
            engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
            given = {"engine": engine, "sandboxes": client, "tokenizer": tokenizer, "tasks": tasks, "store": store}
            await run_shard(plan, 0, **given, grader=GraderByDiff())

    asyncio.run(run())
    groups = [find_group(plan, each, store) for each in plan.groups]
    for group in groups:
        assert group is not None
        outcomes, solved = group.table("episodes.parquet")["outcome"].to_pylist(), group.meta["solved"]
        assert outcomes.count("dropped") == 6 and None not in solved
        kept = [verdict for verdict, outcome in zip(solved, outcomes, strict=True) if outcome != "dropped"]
        if len(set(solved)) == 2:
            assert sorted(kept) == [False, True]
    facts = merge_groups(plan, store).meta
    every = [verdict for group in groups if group is not None for verdict in group.meta["solved"]]
    assert facts["solve_rate_estimated"] == pytest.approx(sum(every) / len(every)), "known, not guessed"
    assert facts["solve_rate_lowest"] == facts["solve_rate_highest"]


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
