"""The ranks of several machines, here several agents on one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from trainer_world import World

from tests.ports import free_port
from trainer.config import SftJob
from trainer.errors import RanksLost, TrainingConfigError
from trainer.nodes import NODE_INDEX, NODES, RENDEZVOUS_S, Node, await_address, local_ranks, this_node


def agents_of(job: SftJob, count: int, **variables: str) -> list[subprocess.Popen[str]]:
    """One agent for each machine."""
    port = free_port()
    common = {NODES: str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), RENDEZVOUS_S: "60", **variables}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainer", "--job", job.model_dump_json()],
            env={**os.environ, **common, NODE_INDEX: str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def test_machines_share_the_ranks_in_order() -> None:
    nodes = [Node(index, 2, "a", 1, 1.0) for index in range(2)]
    assert [list(local_ranks(node, 6)) for node in nodes] == [[0, 1, 2], [3, 4, 5]]
    assert local_ranks(None, 3) == range(3)
    with pytest.raises(TrainingConfigError, match="ranks is 3, which 2 machines can't share evenly"):
        local_ranks(nodes[0], 3)


def test_malformed_machines_name_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODES, raising=False)
    assert this_node() is None
    monkeypatch.setenv(NODES, "two")
    with pytest.raises(TrainingConfigError, match="is not a number"):
        this_node()
    monkeypatch.setenv(NODES, "2")
    monkeypatch.setenv(NODE_INDEX, "2")
    monkeypatch.setenv("MASTER_ADDR", "here")
    with pytest.raises(TrainingConfigError, match="TRIPLANE_NODE_INDEX=2, TRIPLANE_NODES=2"):
        this_node()


def test_name_that_never_resolves_ends_the_wait() -> None:
    with pytest.raises(RanksLost, match=r"rank 1 of 2 lost another rank \(absent\.invalid can't be resolved after 0"):
        await_address(Node(1, 2, "absent.invalid", 29400, 0.1), 2)
    assert await_address(Node(0, 2, "127.0.0.1", 29400, 1.0), 2) == "lo"


def test_starter_of_one_machine_is_refused_on_several(world: World) -> None:
    job = world.sft_job("starter").model_copy(update={"ranks": 2, "starter": "torchrun"})
    for agent in agents_of(job, 2):
        _, err = agent.communicate(timeout=60)
        assert agent.returncode == 2
        assert "starter torchrun starts ranks on one machine only, this job has 2: set" in err.splitlines()[-1]


@pytest.mark.slow
def test_two_machines_of_two_ranks_train_the_checkpoint_of_four_ranks(world: World) -> None:
    four = {"ranks": 4, "rank_timeout_s": 30.0}
    here = world.sft_job("four").model_copy(update=four)
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--job", here.model_dump_json()], capture_output=True, text=True, check=True
    )
    first, second = agents_of(world.sft_job("two by two").model_copy(update=four), 2)
    out, err = first.communicate(timeout=120)
    assert (first.returncode, second.wait(60)) == (0, 0), err
    found, expected = (json.loads(each.splitlines()[-1])["checkpoint"]["digest"] for each in (out, done.stdout))
    assert found == expected


@pytest.mark.slow
def test_killed_machine_ends_the_ranks_of_the_others(world: World) -> None:
    config = {"max_steps": 4000, "evaluate_every": 5, "expected_solve": 1.0}
    job = world.sft_job("lost", **config).model_copy(update={"ranks": 2, "rank_timeout_s": 10.0})
    first, second = agents_of(job, 2)
    assert first.stderr is not None
    while "expected_solve" not in (line := first.stderr.readline()):
        assert line, "the job ended before its first evaluation"
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, err = first.communicate(timeout=60)
    assert first.returncode == 3
    assert "rank 0 of 2 lost another rank" in err.splitlines()[-1]
