"""The benchmark of routing at a small size, and its bounds."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.goals import load_goals
from benchmarks.routing_load import BLOCK, Conversation, Turn, answer, group_load, least, trace_load
from benchmarks.routing_replicas import Imbalance, Machine, Replica, imbalance, mean_of
from benchmarks.routing_virtual import play
from contracts.errors import ConfigError

MACHINE = Machine(prefill=4000, decode=50, slots=32, room=8192)


def test_imbalance_is_told_from_one_long_request() -> None:
    one, other = Replica(MACHINE), Replica(MACHINE)
    assert imbalance([one, other]) is None
    one.flying.append(90)
    assert imbalance([one, other]) == (2, 1), "the request can't be divided"
    other.flying += [5, 5]
    assert imbalance([one, other]) == (1.8, 1)
    one.flying.append(30)
    assert imbalance([one, other]) == (120 / 65, 120 / 90)
    assert mean_of([Imbalance(2, 1), Imbalance(4, 2)]) == (3, 1.5)


@pytest.mark.slow
def test_both_ways_are_measured(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 64, "hash_ids": [at % 3, at]}
        for at in range(30)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    result = routing.run(routing.OPTIONS(quick=True, speed=25, trace=str(trace), peers=""))
    assert not result.judged and len(result.rows) == 10
    assert {goal.metric for goal in load_goals()["routing"]} <= result.metrics.keys()
    for row in result.rows:
        assert row["computed"] >= 1 and row["makespan"] >= 1 and row["imbalance"] >= 1, row
        assert 1 <= row["imbalance_over_least"] <= row["imbalance"] + 1e-9, row
    assert result.metrics["groups_hashing_computed"] == 1, "each group stays at one replica, which has room for it"


def test_bounds_are_those_of_a_load_computed_by_hand() -> None:
    shared = list(range(2 * BLOCK))
    talks = [Conversation(name, "k", [Turn(shared, 20), Turn([1] * 10, 5)]) for name in ("a", "b")]
    found = least(talks, replicas=2, prefill=10.0, decode=5.0, slots=1)
    first = 2 * BLOCK + (2 * BLOCK + 20 + 10 - 3 * BLOCK)
    assert found.computed == first + 2 * BLOCK + 20 + 10 - 3 * BLOCK
    assert found.seconds == max(found.computed / 10 / 2, 50 / 5 / 2, 25 / 5)
    assert answer("a", 0, 20) == answer("a", 0, 20) != answer("b", 0, 20)


def test_groups_share_their_prompt_and_have_stragglers() -> None:
    talks = group_load(groups=2, members=16, turns=3, prompt=64)
    assert len({tuple(each.turns[0].tokens) for each in talks}) == 2
    lengths = sorted(sum(turn.sampled for turn in each.turns) for each in talks)
    assert lengths[-1] > 3 * lengths[len(lengths) // 2]


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}")
    for path in (bad, tmp_path / "missing.jsonl"):
        with pytest.raises(ConfigError, match=f"--trace {path} is no trace"):
            trace_load(path, 5, 16)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [12, 24])
def test_members_of_a_group_stay_together_and_are_not_waited_for(groups: int) -> None:
    found = play(group_load(groups, 16, 4, 2048), MACHINE, 8)
    assert found.computed <= 1.02 and found.makespan <= 1.1


def test_virtual_time_gives_equal_figures_for_equal_code() -> None:
    talks = group_load(3, 8, 2, 512)
    assert play(talks, MACHINE, 4) == play(talks, MACHINE, 4)


@pytest.mark.slow
def test_half_of_a_replicas_speed_costs_the_router_less_than_hashing() -> None:
    talks = group_load(8, 8, 4, 2048)
    route, hashing = (
        sum(play(talks, MACHINE, 4, slow, place).makespan for slow in range(4))
        for place in (None, functools.partial(routing.hashed, replicas=4))
    )
    assert route <= 0.85 * hashing
