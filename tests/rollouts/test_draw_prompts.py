from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rollouts_script import make_plan, make_tasks

from inference.errors import PlanError
from inference.rollouts.config import RolloutConfig
from inference.rollouts.plan import RolloutPlan, draw_prompts

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 6), st.integers(0, 300), st.integers(0, 9))


@given(SIZES)
def test_a_draw_repeats_no_task_unless_the_suite_is_smaller(sizes: tuple[int, int, int, int, int]) -> None:
    suite, count, reserve, cursor, seed = sizes
    ids = [f"t{index}" for index in range(suite)]
    groups, spare, after = draw_prompts(ids, count=count, reserve=reserve, cursor=cursor, seed=seed, iteration="0000")
    drawn = [group.task_id for group in (*groups, *spare)]
    assert (len(groups), len(spare)) == (count, reserve)
    assert [group.index for group in (*groups, *spare)] == list(range(count + reserve))
    assert after >= cursor + count + reserve
    if count + reserve <= suite:
        assert len(set(drawn)) == len(drawn)
    else:
        assert max(Counter(drawn).values()) <= (count + reserve) // suite + 2
    assert draw_prompts(ids[::-1], count=count, reserve=reserve, cursor=cursor, seed=seed, iteration="0000") == (
        groups,
        spare,
        after,
    )


def test_draws_that_divide_the_suite_visit_every_task_once_an_epoch() -> None:
    ids = [f"t{index}" for index in range(12)]
    for epoch in range(3):
        seen: list[str] = []
        for step in range(4):
            cursor = 12 * epoch + 3 * step
            groups, _, after = draw_prompts(ids, count=3, reserve=0, cursor=cursor, seed=0, iteration=f"{step}")
            assert after == cursor + 3
            seen += [group.task_id for group in groups]
        assert sorted(seen) == sorted(ids)


def test_an_empty_suite_is_refused_with_the_fix() -> None:
    with pytest.raises(PlanError, match="larger train split"):
        draw_prompts([], count=1, reserve=0, cursor=0, seed=0, iteration="0000")


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 7))
def test_shards_partition_the_plan(workers: int, count: int, reserve: int) -> None:
    plan = make_plan(make_tasks(20), count, reserve, workers)
    shards = [plan.shard(shard) for shard in range(workers)]
    assert sorted(group.index for groups, _ in shards for group in groups) == list(range(count))
    assert sorted(group.index for _, spare in shards for group in spare) == list(range(count, count + reserve))
    with pytest.raises(PlanError, match="does not exist"):
        plan.shard(workers)


def test_a_plan_survives_json_and_refuses_a_group_twice() -> None:
    plan = make_plan(make_tasks(5), 3, 2)
    assert RolloutPlan.model_validate_json(plan.model_dump_json()) == plan
    with pytest.raises(ValidationError, match="occurs twice"):
        RolloutPlan.model_validate({**plan.model_dump(), "reserve": [plan.groups[0].model_dump()]})


def test_a_turn_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_turn_tokens 300 exceeds max_tokens 256"):
        RolloutConfig(max_turn_tokens=300)
