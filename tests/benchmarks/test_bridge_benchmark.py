"""The benchmarks of the bridge at a small size: they measure, and the faults of the other change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import bridge, bridge_chaos
from benchmarks.bridge_chaos_hosted import executions
from benchmarks.bridge_chaos_play import TURNS, Log, Seen, digest_of, following, prompt_of
from benchmarks.goals import check_goals, load_goals
from inference.bridge.client import Finish, Record, Span, Turn

pytestmark = pytest.mark.slow


def turn(step: int, observation: list[int], tokens: list[int]) -> Turn:
    ids = np.array(tokens, np.int32)
    spans = (Span("v", 0, len(tokens)),)
    return Turn(step, np.array(observation, np.int32), ids, -ids.astype(np.float32), spans, Finish.LENGTH)


def test_bridge_is_measured() -> None:
    result = bridge.run(bridge.OPTIONS(repeats=1, steps=64, episodes=128, peers=""))
    assert not result.judged
    assert 0 < result.metrics["step_p50_ms"] < 100 and result.metrics["steps_per_second"] > 10
    wanted = {goal.metric for goal in load_goals()["bridge"]} - {"times_openenv"}
    assert wanted <= result.metrics.keys()


def test_faults_change_nothing() -> None:
    result = bridge_chaos.run(bridge_chaos.OPTIONS(episodes=96, faults=60))
    assert all(verdict.met for verdict in check_goals(load_goals()["bridge-chaos"], result.metrics)), result
    assert result.metrics["calls_wrong"] == 0 and result.metrics["hosted"] > 8, result
    assert all(row["dealt"] > 0 for row in result.rows)


def test_faults_are_noticed_in_the_log(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.piece(3, 1, 0, np.array([5, 6], np.int32).tobytes(), np.array([-5, -6], np.float32).tobytes())
    log.turn(3, turn(1, [], [5, 6, 7]))
    log.piece(4, 1, 0, np.array([5, 6], np.int32).tobytes(), np.array([-5, -6], np.float32).tobytes())
    log.turn(4, turn(1, [], [5, 8, 7]))
    log.done(3, {"call": 2})
    with (tmp_path / "log").open("ab") as file:
        file.write(b'{"turn": [3, 2], "ids')
    seen = Seen(tmp_path / "log")
    assert seen.changed() == 2 and seen.done == {3: {"call": 2}}
    assert seen.turns[3][0].token_ids.tolist() == [5, 6, 7]
    Log(tmp_path / "log").done(4, None)
    assert Seen(tmp_path / "log").done == {3: {"call": 2}, 4: None}


def test_calls_that_run_twice_are_noticed() -> None:
    table = pa.table({"final_diff": [b"+mark a\n+mark b\n+mark a\n mark c\n+other\n"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert executions(Record("e", sink.getvalue().to_pybytes(), "")) == {"a": 2, "b": 1}


def test_transcript_does_not_depend_on_where_an_engine_was_lost() -> None:
    asked = following(5, [])
    assert asked is not None and asked[0] == []
    whole = [turn(1, [], list(range(asked[1])))]
    split = [turn(1, [], list(range(4))), turn(2, [], list(range(4, asked[1])))]
    assert following(5, split[:1]) == ([], asked[1] - 4)
    assert following(5, whole) == following(5, split) != following(5, [turn(1, [], list(range(1, asked[1] + 1)))])
    assert digest_of(5, whole) == digest_of(5, split)
    played: list[Turn] = []
    while (after := following(5, played)) is not None:
        played.append(turn(len(played) + 1, *(after[0], [1] * after[1])))
    assert len(played) == TURNS and len(prompt_of(5)) == 9
