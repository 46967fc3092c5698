"""Ranks on machines that share no disk: the results of one machine, and a kill leaves nothing half-written.

Each machine is an agent in a mount namespace in which its own folder lies over those of all machines, so that a path of
another machine does not exist.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from test_backends import FSDP2, with_backend
from test_trainer_rl import own_dataset
from trainer_world import World, make_world

from contracts.artifacts import ArtifactRef, find_artifact, list_artifacts
from contracts.digests import digest_of
from contracts.failpoints import KILL_VARIABLE
from contracts.filecache import CACHE_FOLDER
from contracts.upkeep import check_store, find_garbage, remove_garbage
from tests.ports import free_port
from trainer.config import SNAPSHOT, RlJob, SftJob
from trainer.nodes import NODE_INDEX, NODES, RENDEZVOUS_S
from trainer.run import run_job

ZERO3 = {"backend": "deepspeed", "zero_stage": 3}
BACKENDS = [pytest.param(FSDP2, id="fsdp2"), pytest.param(ZERO3, id="zero3")]
SNAPSHOTS = {"max_steps": 6, "evaluate_every": 3, "snapshot_every": 2}


def can_separate() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_separate(), reason="needs mount namespaces")]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def remote(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Artifacts in a bucket of the test's own."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "TRIPLANE_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"disks-{digest_of([tmp_path.name])[:20]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return make_world(tmp_path, f"s3://{bucket}/store")


class Machines:
    """Two machines that run one job, a rank on each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for index in range(2):
            (folder / str(index)).mkdir(parents=True, exist_ok=True)

    def start(self, job: SftJob | RlJob, kill: Mapping[int, str] | None = None) -> list[subprocess.Popen[str]]:
        """One agent for each. kill: failpoint by rank."""
        port = str(free_port())
        found = []
        for index in range(2):
            own = {NODES: "2", NODE_INDEX: str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            disk = {name: str(self.folder) for name in ("HOME", "TMPDIR")}
            disk["TRIPLANE_CACHE"] = f"{self.folder}/cache"
            at = {KILL_VARIABLE: kill[index]} if kill and index in kill else {}
            script = 'mount --bind "$0" "$1" && shift && exec "$@"'
            within = ["unshare", "--mount", "sh", "-c", script, str(self.folder / str(index)), str(self.folder)]
            found.append(
                subprocess.Popen(
                    [*within, sys.executable, "-m", "trainer", "--job", job.model_dump_json()],
                    env={**os.environ, RENDEZVOUS_S: "60", **own, **disk, **at},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return found

    def run(self, job: SftJob | RlJob) -> dict[str, str]:
        """Digests that both together publish."""
        first, second = self.start(job)
        out, err = first.communicate(timeout=240)
        _, other = second.communicate(timeout=60)
        assert (first.returncode, second.returncode) == (0, 0), err + other
        return digests(out)

    def run_killed(self, job: SftJob | RlJob, kill: Mapping[int, str]) -> str:
        """Run with a failpoint; both end. Returns the last line of the machine whose rank was not killed."""
        agents = self.start(job, kill)
        lines = [agent.communicate(timeout=120)[1].splitlines() for agent in agents]
        (killed,) = kill
        assert agents[killed].returncode == 128 + signal.SIGKILL, lines
        assert agents[1 - killed].returncode != 0
        return lines[1 - killed][-1]

    def left(self) -> list[str]:
        """Files that no process needs any more, but copies of what is in the store."""
        return sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob(f"cache/{CACHE_FOLDER}/tmp/*")
            if path.name != "tmp"
        )


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    return Machines(tmp_path / "machines")


def digests(out: str) -> dict[str, str]:
    result = json.loads(out.splitlines()[-1])
    return {name: ArtifactRef(**result[name]).digest for name in ("checkpoint", "trainer_state")}


def run_here(job: SftJob | RlJob) -> dict[str, str]:
    """Digests of two ranks of this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--job", job.model_dump_json()], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return digests(done.stdout)


def sft_job(world: World, name: str, backend: Mapping[str, Any], **config: Any) -> SftJob:
    job = with_backend(world.sft_job(name, **(SNAPSHOTS | config)), 2, **backend)
    assert isinstance(job, SftJob)
    return job.model_copy(update={"rank_timeout_s": 20.0})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_warm_start_on_two_machines_gives_the_digests_of_one(
    remote: World, machines: Machines, backend: Mapping[str, Any]
) -> None:
    expected = run_here(sft_job(remote, "here", backend))
    assert machines.run(sft_job(remote, "there", backend)) == expected
    assert machines.left() == []
    assert not find_garbage(remote.store, older_than_s=-1.0) and not list(list_artifacts(remote.store, SNAPSHOT))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_iteration_on_two_machines_gives_the_digests_of_one(
    remote: World, machines: Machines, backend: Mapping[str, Any]
) -> None:
    base = run_job(remote.sft_job("base"))
    assert base is not None
    dataset = own_dataset(remote, base)
    config = {"optimizer_steps": 4, "snapshot_every": 1, "algorithm": {"kind": "ppo"}}
    here, there = (
        with_backend(remote.rl_job(name, dataset, base.checkpoint, base.trainer_state, **config), 2, **backend)
        for name in ("here", "there")
    )
    assert machines.run(there) == run_here(here)
    assert not find_garbage(remote.store, older_than_s=-1.0)


KILLS = [
    pytest.param(0, "rank-part-stored:1", id="rank 0 in its first snapshot"),
    pytest.param(1, "rank-part-stored:1", id="rank 1 in its first snapshot"),
    pytest.param(0, "rank-part-stored:2", id="rank 0 in its second snapshot"),
    pytest.param(1, "rank-part-stored:3", id="rank 1 in its trainer state"),
    pytest.param(0, "rank-part-stored:4", id="rank 0 in its checkpoint"),
    pytest.param(1, "rank-part-stored:4", id="rank 1 in its checkpoint"),
    pytest.param(0, "ranks-gathered:1", id="rank 0 before its first commit"),
]


@pytest.mark.parametrize(("rank", "point"), KILLS)
def test_a_rank_killed_while_it_uploads_leaves_nothing_visible_and_the_rerun_gives_the_same_digest(
    remote: World, machines: Machines, rank: int, point: str
) -> None:
    expected = run_here(sft_job(remote, "here", FSDP2))
    job = sft_job(remote, "killed", FSDP2)
    said = machines.run_killed(job, {rank: point})
    assert f"rank {1 - rank} of 2" in said
    assert find_artifact(remote.store, "checkpoint", job.key) is None
    assert check_store(remote.store).faults == []
    assert machines.run(job) == expected
    for garbage in find_garbage(remote.store, older_than_s=-1.0):
        assert garbage.what == "attempt" and remove_garbage(remote.store, garbage)
    assert check_store(remote.store).faults == []
