"""Several processes that train one job: the same gradient, one result, one error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_rl import own_dataset
from trainer_world import QUICKSTART, World

from contracts.artifacts import ArtifactRef, find_artifact, open_artifact
from trainer.config import RlJob, SftJob
from trainer.lifetime import MEETING_VARIABLE
from trainer.ranks import Ranks
from trainer.run import run_job

LONG = {"max_steps": 4000, "evaluate_every": 5, "snapshot_every": 5, "expected_solve": 1.0}


def job_of(world: World, name: str, ranks: int, timeout_s: float = 45.0, **config: Any) -> SftJob:
    return world.sft_job(name, **config).model_copy(update={"ranks": ranks, "rank_timeout_s": timeout_s})


def start(job: SftJob | RlJob) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", "--job", job.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_pids(agent: int) -> dict[int, int]:
    """Rank -> pid of the agent's children."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == agent:
            found |= {int(each[5:]): int(entry.name) for each in variables if each.startswith(b"RANK=")}
    return found


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def await_training(agent: subprocess.Popen[str]) -> dict[int, int]:
    """Wait for the first evaluation. Returns the ranks' pids."""
    assert agent.stderr is not None
    while "expected_solve" not in (line := agent.stderr.readline()):
        assert line, "the job ended before its first evaluation"
    return rank_pids(agent.pid)


@pytest.mark.slow
def test_the_gradient_is_the_same_however_many_ranks_share_the_batch(world: World, tmp_path: Path) -> None:
    found = {}
    for count in (1, 2, 4):
        job = job_of(world, "gradients", count, router_balance=0.1, max_gradient_norm=1e9).model_dump_json()
        out = tmp_path / f"{count}.pt"
        ranks = []
        for rank in range(count):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
            variables[MEETING_VARIABLE] = str(tmp_path / f"meeting-{count}")
            command = [sys.executable, str(Path(__file__).with_name("rank_gradients.py")), job, str(out)]
            ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
        assert [each.wait(120) for each in ranks] == [0] * count
        found[count] = torch.load(out)
    for count in (2, 4):
        for name, whole in found[1].items():
            assert float((found[count][name] - whole).norm() / whole.norm()) < 1e-5, (count, name)


@pytest.mark.slow
def test_two_ranks_publish_one_result_and_a_repeated_job_reads_it(world: World) -> None:
    job = job_of(world, "two", 2)
    first = start(job)
    out, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    checkpoint = json.loads(out.splitlines()[-1])["checkpoint"]
    assert open_artifact(world.store, ArtifactRef(**checkpoint)).manifest.config["numerics"]["ranks"] == 2
    again = start(job)
    assert json.loads(again.communicate(timeout=120)[0].splitlines()[-1])["checkpoint"] == checkpoint


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_its_name_and_the_next_run_gives_the_undisturbed_result(world: World) -> None:
    config = LONG | {"max_steps": 60}
    undisturbed = start(job_of(world, "undisturbed", 2, **config))
    digest = json.loads(undisturbed.communicate(timeout=120)[0].splitlines()[-1])["checkpoint"]["digest"]
    job = job_of(world, "killed", 2, **config)
    agent = start(job)
    pids = await_training(agent)
    os.kill(pids[1], signal.SIGKILL)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 137
    assert err.splitlines()[-1] == "trainer: rank 1 of 2: was killed by SIGKILL"
    assert sum("trainer: " in line for line in err.splitlines()) == 1
    assert all(ended(pid) for pid in pids.values())
    assert find_artifact(world.store, "checkpoint", job.key) is None
    resumed = start(job)
    assert json.loads(resumed.communicate(timeout=120)[0].splitlines()[-1])["checkpoint"]["digest"] == digest


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job(world: World) -> None:
    agent = start(job_of(world, "hung", 2, timeout_s=3.0, **LONG))
    pids = await_training(agent)
    os.kill(pids[1], signal.SIGSTOP)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 3
    assert err.splitlines()[-1] == "trainer: rank 1 of 2: did not answer"
    assert all(ended(pid) for pid in pids.values())


@pytest.mark.slow
def test_ranks_end_with_a_killed_agent(world: World) -> None:
    agent = start(job_of(world, "orphans", 2, timeout_s=10.0, **LONG))
    pids = await_training(agent)
    agent.kill()
    agent.communicate()
    deadline = time.monotonic() + 30
    while not all(ended(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "ranks outlive their agent"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(world: World) -> None:
    agent = start(job_of(world, "stopped", 2, **LONG))
    pids = await_training(agent)
    agent.send_signal(signal.SIGINT)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 130
    assert "run the same job again to continue" in err.splitlines()[-1]
    assert all(ended(pid) for pid in pids.values())


@pytest.mark.slow
def test_more_ranks_than_demonstrations_in_a_batch_are_refused(world: World) -> None:
    agent = start(job_of(world, "many", 3, batch_size=2))
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 2
    assert "a batch has 2 demonstrations: lower ranks" in err.splitlines()[-1]


@pytest.mark.slow
def test_another_number_of_processes_than_the_jobs_ranks_is_refused(world: World) -> None:
    command = [sys.executable, "-m", "trainer", "--job", job_of(world, "wrong", 2).model_dump_json()]
    variables = {"RANK": "0", "WORLD_SIZE": "1"}
    ended_job = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert ended_job.returncode == 2
    assert "job field ranks is 2, but 1 processes were started" in ended_job.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_disjoint_and_complete(count: int) -> None:
    shares = [Ranks(rank, count).share(range(10)) for rank in range(count)]
    assert sorted(item for share in shares for item in share) == list(range(10))


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": QUICKSTART, "router_balance": 0.1},
    "gspo": {"algorithm": {"kind": "gspo"}, "corrections": {"veto": 1e-6}},
    "ppo": {"algorithm": {"kind": "ppo"}},
}


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("grpo", (1, 2)),
        pytest.param("grpo", (1, 4), marks=pytest.mark.slow),
        pytest.param("gspo", (1, 2), marks=pytest.mark.slow),
        pytest.param("ppo", (1, 2), marks=pytest.mark.slow),
    ],
)
def test_the_gradient_of_a_policy_step_is_the_same_on_any_number_of_ranks(
    world: World, kind: str, counts: tuple[int, ...]
) -> None:
    base = run_job(world.sft_job("ranks-base", max_steps=40))
    assert base is not None
    dataset = own_dataset(world, base)
    still = {"learning_rate": 0.0, "optimizer_steps": 1, "max_gradient_norm": 1e9, "microbatch_tokens": 64}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for count in counts:
        config = still | ALGORITHMS[kind]
        job = world.rl_job(f"{kind}-{count}-{counts[-1]}", dataset, base.checkpoint, base.trainer_state, **config)
        agent = start(job.model_copy(update={"ranks": count}))
        out, err = agent.communicate(timeout=120)
        assert agent.returncode == 0, err
        state = open_artifact(world.store, ArtifactRef(**json.loads(out.splitlines()[-1])["trainer_state"]))
        tensors = load_file(state.path("state.safetensors"))
        moments[count] = {name: each for name, each in tensors.items() if "exp_avg." in name}
    assert any(name.startswith("critic.") for name in moments[1]) == (kind == "ppo")
    whole = torch.cat([each.reshape(-1) for each in moments[1].values()])
    assert float(whole.norm()) > 0
    for count in counts[1:]:
        shared = torch.cat([moments[count][name].reshape(-1) for name in moments[1]])
        assert float((shared - whole).norm() / whole.norm()) < 1e-5
