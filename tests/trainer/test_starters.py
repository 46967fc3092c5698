"""Jobs that torchrun or DeepSpeed's launcher starts: one result, one error."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_trainer_ranks import LONG, ended, rank_pids, start
from trainer_world import World

from contracts.artifacts import ArtifactRef, open_artifact
from trainer.config import SftJob

STARTERS = ["torchrun", "deepspeed"]
pytestmark = pytest.mark.slow


def job_of(world: World, name: str, starter: str, **config: object) -> SftJob:
    fields = {"ranks": 2, "starter": starter, "rank_timeout_s": 5.0}
    return SftJob.model_validate(world.sft_job(name, **config).model_dump() | fields)


def pids_of(job: SftJob) -> dict[int, int]:
    """Rank -> pid of the processes that train the job."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            if job.key.encode() in (folder / "cmdline").read_bytes():
                found |= rank_pids(int(folder.name))
    return found


@pytest.mark.parametrize("starter", STARTERS)
def test_two_processes_publish_one_result_with_the_bits_of_the_agents(world: World, starter: str) -> None:
    found = {}
    for each in ("agent", starter):
        process = start(job_of(world, each, each))
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        found[each] = json.loads(out.splitlines()[-1])["checkpoint"]
    assert open_artifact(world.store, ArtifactRef(**found[starter])).manifest.config["numerics"]["ranks"] == 2
    assert found[starter]["digest"] == found["agent"]["digest"]


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_ends_the_job_with_one_error(
    world: World, starter: str, number: signal.Signals
) -> None:
    job = job_of(world, "disturbed", starter, **LONG)
    process = start(job)
    assert process.stderr is not None
    while "expected_solve" not in (line := process.stderr.readline()):
        assert line, "the job ended before its first evaluation"
    pids = pids_of(job)
    assert set(pids) == {0, 1}
    os.kill(pids[1], number)
    since = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3 and time.monotonic() - since < 60
    assert err.splitlines()[-1].startswith("trainer: rank 1 of 2: was killed or did not answer"), err
    deadline = time.monotonic() + 20
    while not all(ended(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "ranks outlive their job"
        time.sleep(0.1)
