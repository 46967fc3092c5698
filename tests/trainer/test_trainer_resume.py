"""Snapshots of an RL iteration: a killed job continues with the same bits, and what is damaged is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_rl import own_dataset
from trainer_world import World

from contracts import failpoints
from contracts.artifacts import Artifact, discard_artifact, find_artifact, list_artifacts, open_artifact
from contracts.store import LocalStore
from trainer.algorithms.ppo import Ppo
from trainer.config import SNAPSHOT, LoraConfig, RlConfig, RlJob, SftJob
from trainer.errors import SnapshotRefused, TrainingDataError, TrainingStopped
from trainer.metrics import Record
from trainer.result import TrainResult
from trainer.run import run_job
from trainer.snapshots import Snapshots
from trainer.state import TrainerState, load_state

STEPS = {"optimizer_steps": 6, "snapshot_every": 2}


@pytest.fixture
def job(world: World) -> RlJob:
    """Six minibatches with a snapshot after the second and the fourth."""
    start = run_job(world.sft_job("base", max_steps=2))
    dataset = own_dataset(world, start, groups=6, size=2)
    return world.rl_job("iteration", dataset, start.checkpoint, start.trainer_state, **STEPS)


def renamed(job: RlJob, name: str, **config: Any) -> RlJob:
    key = job.key[: -len(name)] + "".join(f"{ord(each) % 16:x}" for each in name)
    return job.model_copy(update={"key": key, "config": job.config.model_copy(update=config)})


def digests(result: TrainResult | None) -> tuple[str, str]:
    assert result is not None
    return result.checkpoint.digest, result.trainer_state.digest


def numbers(world: World, result: TrainResult | None) -> list[Record]:
    """Metrics of a checkpoint, without times."""
    assert result is not None
    lines = open_artifact(world.store, result.checkpoint).path("metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def snapshots_of(world: World) -> list[Artifact]:
    return list(list_artifacts(world.store, SNAPSHOT))


class Interrupted(Exception):
    """Ends a job as an error would; its last snapshot is still written."""


def stop_at(step: int) -> Any:
    """Watcher that ends a job after so many optimizer steps of it."""
    steps: list[Record] = []

    def watch(record: Record) -> None:
        steps.extend([record] if "loss" in record else [])
        if len(steps) == step:
            raise Interrupted

    return watch


def interrupted(world: World, job: RlJob) -> Artifact:
    """The snapshot after four minibatches of a job that was stopped in the fifth."""
    with pytest.raises(Interrupted):
        run_job(job, [stop_at(5)])
    (left,) = snapshots_of(world)
    return left


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"algorithm": Ppo()}, id="ppo", marks=pytest.mark.slow),
        pytest.param({"router_balance": 0.1}, id="balance", marks=pytest.mark.slow),
    ],
)
def test_a_killed_iteration_continues_bit_for_bit(world: World, job: RlJob, config: dict[str, Any]) -> None:
    whole, killed = (renamed(job, name, **config) for name in ("whole", "killed"))
    undisturbed = run_job(whole)
    interrupted(world, killed)
    seen: list[Record] = []
    resumed = run_job(killed, [seen.append])
    assert len([record for record in seen if "loss" in record]) == 2
    assert digests(resumed) == digests(undisturbed)
    assert numbers(world, resumed) == numbers(world, undisturbed)
    assert resumed is not None and undisturbed is not None and resumed.metrics == undisturbed.metrics
    assert not snapshots_of(world)


def test_a_damaged_snapshot_is_refused_by_its_name(world: World, job: RlJob) -> None:
    left = interrupted(world, job)
    path = left.path("state.safetensors")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(SnapshotRefused, match=f"{left.ref.uri}/state.safetensors.*truncated or changed"):
        run_job(job)


def test_a_snapshot_without_a_manifest_does_not_exist(world: World, job: RlJob) -> None:
    left = interrupted(world, job)
    world.store.delete(f"{left.ref.uri}/manifest.json")
    assert digests(run_job(job)) == digests(run_job(renamed(job, "whole")))


def test_a_snapshot_of_other_settings_is_refused_by_its_name(world: World, job: RlJob) -> None:
    left = interrupted(world, job)
    other = job.model_copy(update={"config": job.config.model_copy(update={"learning_rate": 0.5})})
    with pytest.raises(SnapshotRefused, match=rf"{left.ref.uri} .* learning_rate 0\.003, the job has 0\.5"):
        run_job(other)


def test_a_failing_write_is_an_error(world: World, job: RlJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.FAIL_VARIABLE, "state-staged:1:ENOSPC")
    monkeypatch.setattr(failpoints, "_ORDERED", True)
    failpoints._orders.cache_clear()
    try:
        with pytest.raises(Exception, match=r"No space left|is full"):
            run_job(job)
    finally:
        failpoints._orders.cache_clear()


def test_iterations_of_few_steps_write_none_and_their_settings_stay_as_they_were(world: World, job: RlJob) -> None:
    assert "snapshot_every" not in RlConfig().model_dump()
    assert RlConfig(snapshot_every=2).model_dump()["snapshot_every"] == 2
    usual = renamed(job, "usual", snapshot_every=8)
    with pytest.raises(Interrupted):
        run_job(usual, [stop_at(5)])
    assert not snapshots_of(world)


def state_alone(job: SftJob | RlJob) -> None:
    """Run a job that ends between its two commits."""

    def die(name: str) -> None:
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("trainer.publishing.failpoint", die)
        run_job(job)


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig()}], ids=["all weights", "adapter"])
@pytest.mark.parametrize("backend", ["torch", "fsdp2"])
def test_a_checkpoint_has_the_weights_of_the_state_that_is_committed(
    world: World, job: RlJob, backend: str, settings: dict[str, Any]
) -> None:
    """A second run after a kill trains other weights on other hardware; here by another seed."""
    job = renamed(job, "pair", optimizer_steps=2, **settings).model_copy(update={"backend": backend})
    state_alone(job)
    (left,) = (each for each in list_artifacts(world.store, "trainer_state") if each.ref.key == job.key)
    seen: list[Record] = []
    found = run_job(job.model_copy(update={"seed": job.seed + 1}), [seen.append])
    assert found is not None and found.trainer_state == left.ref and found.metrics["step"] == left.meta["step"]
    assert "another run of this job has committed" in str(seen[-1]["warning"])
    refs = {"checkpoint": found.checkpoint, "trainer_state": found.trainer_state}
    assert run_job(renamed(job, "next").model_copy(update=refs)) is not None


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig()}], ids=["all weights", "adapter"])
@pytest.mark.parametrize("backend", ["torch", "fsdp2"])
def test_a_checkpoint_without_state_gets_none_of_other_weights(
    world: World, job: RlJob, backend: str, settings: dict[str, Any]
) -> None:
    """`triplane gc` removes states; training again gives other weights on other hardware, here by another seed."""
    job = renamed(job, "lone", optimizer_steps=2, **settings).model_copy(update={"backend": backend})
    before = run_job(job)
    assert before is not None
    discard_artifact(world.store, before.trainer_state)
    with pytest.raises(TrainingDataError, match=rf"artifacts/checkpoint/{job.key} has lost its trainer_state.*delete"):
        run_job(job.model_copy(update={"seed": job.seed + 1}))
    assert find_artifact(world.store, "trainer_state", job.key) is None
    assert digests(run_job(job)) == digests(before)


def test_a_base_policy_has_the_weights_of_the_state_that_is_committed(world: World) -> None:
    job = world.sft_job("base", max_steps=2, snapshot_every=100)
    state_alone(job)
    base = run_job(job.model_copy(update={"seed": job.seed + 1}))
    assert base is not None
    assert run_job(world.rl_job("first", own_dataset(world, base), base.checkpoint, base.trainer_state)) is not None


def test_a_job_killed_between_its_commits_publishes_the_same_bits(world: World, job: RlJob) -> None:
    whole, killed = renamed(job, "whole"), renamed(job, "killed")
    state_alone(killed)
    resumed, undisturbed = run_job(killed), run_job(whole)
    assert digests(resumed) == digests(undisturbed)
    assert numbers(world, resumed) == numbers(world, undisturbed)


def test_snapshots_of_a_job_killed_after_its_commits_are_removed(
    world: World, job: RlJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: Snapshots) -> None:
        raise Interrupted

    interrupted(world, other := renamed(job, "other"))
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Snapshots, "clear", die)
        run_job(job)
    assert len(snapshots_of(world)) == 2
    assert run_job(job) is not None
    assert [each.manifest.config["job"] for each in snapshots_of(world)] == [other.key]


class SlowStore(LocalStore):
    """A store that writes no manifest before it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        """See Store.create."""
        self.go.wait(30)
        return super().create(key, data, cached=cached)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path) -> None:
    store = SlowStore(tmp_path)
    moving = torch.zeros(4)
    with Snapshots(store, "0" * 64, 1, 10, {}, "1") as snapshots:
        snapshots.save(TrainerState({}, {"adamw.step": moving}, "adamw", 1, {}), 1)
        moving += 7.0
        assert not list(list_artifacts(store, SNAPSHOT))
        store.go.set()
        snapshots.wait()
    (found,) = list_artifacts(store, SNAPSHOT)
    assert found.meta["step"] == 1
    from safetensors.torch import load_file

    assert load_file(found.path("state.safetensors"))["adamw.step"].tolist() == [0.0] * 4


def test_a_snapshot_whose_removal_is_interrupted_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = LocalStore(tmp_path), f"artifacts/{SNAPSHOT}/"
    with Snapshots(store, "0" * 64, 1, 10, {}, "1") as snapshots:
        snapshots.save(TrainerState({}, {"adamw.step": torch.zeros(4)}, "adamw", 1, {}), 1)
        snapshots.wait()
        delete, before = store.delete, len(store.list(files))

        def killed(key: str) -> None:
            delete(key)
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            snapshots.clear()
        assert len(store.list(files)) == before - 1
        assert not list(list_artifacts(store, SNAPSHOT))
        monkeypatch.undo()
        snapshots.clear()
    assert store.list(files) == []


def test_a_stopped_job_leaves_no_files_of_a_write_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.snapshots.STOP_S", 0.1)
    store = SlowStore(tmp_path)
    began = time.monotonic()
    with pytest.raises(TrainingStopped):
        with Snapshots(store, "0" * 64, 1, 10, {}, "1") as snapshots:
            snapshots.save(TrainerState({}, {"adamw.step": torch.zeros(4)}, "adamw", 1, {}), 1)
            raise TrainingStopped(15)
    assert time.monotonic() - began < 20
    assert list(store.scratch.iterdir()) == []
    store.go.set()


def test_a_job_that_is_stopped_while_it_waits_for_a_snapshot_keeps_it(tmp_path: Path) -> None:
    def stop(number: int, _: object) -> None:
        raise TrainingStopped(number)

    store, before = SlowStore(tmp_path), signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(TrainingStopped):
            with Snapshots(store, "0" * 64, 1, 10, {}, "1") as snapshots:
                snapshots.save(TrainerState({}, {"adamw.step": torch.zeros(4)}, "adamw", 1, {}), 1)
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
                threading.Timer(1.0, store.go.set).start()
                snapshots.wait()
        assert [each.meta["step"] for each in list_artifacts(store, SNAPSHOT)] == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_snapshot_keeps_the_starting_log_probabilities(world: World, job: RlJob) -> None:
    left = interrupted(world, job)
    model = open_artifact(world.store, job.checkpoint).json("config.json")
    state = load_state(left, model)
    assert state.extra["done"] == state.extra["taken"] == 4
    assert set(state.loop) == {"start.logprobs"} and state.loop["start.logprobs"].dtype == torch.float32
    assert not any(name.startswith("loop.") for name in state.optimizer)


ALGORITHMS = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]
LONG = {"optimizer_steps": 24, "snapshot_every": 3}


@pytest.mark.parametrize("wanted", [pytest.param(8, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.large)])
@pytest.mark.timeout(1800)
def test_kill_9_at_any_instant_changes_no_bit(world: World, wanted: int) -> None:
    """Processes of `python -m trainer` are killed at random instants between their first record and their end."""
    rng = random.Random(0)
    start = run_job(world.sft_job("base", max_steps=2))
    dataset = own_dataset(world, start, groups=24, size=2)
    kills = 0
    for round_ in range(200):
        kind = ALGORITHMS[round_ % len(ALGORITHMS)]
        config = LONG | {"algorithm": {"kind": kind}}
        whole, killed = (
            world.rl_job(f"{name}-{round_}", dataset, start.checkpoint, start.trainer_state, **config)
            for name in ("whole", "killed")
        )
        undisturbed = run_job(whole)
        while kill_once(killed, rng.uniform(0.0, 0.7)):
            kills += 1
        resumed = run_job(killed)
        assert numbers(world, resumed) == numbers(world, undisturbed), (kind, kills)
        assert digests(resumed) == digests(undisturbed), (kind, kills)
        if kills >= wanted:
            break
    assert kills >= wanted


def kill_once(job: RlJob, after_s: float) -> bool:
    """Run the job, and kill it `after_s` seconds after its first record. Returns False if it ended before."""
    command = [sys.executable, "-m", "trainer", "--job", job.model_dump_json()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()
    try:
        status = process.wait(after_s)
        assert status == 0, process.stderr.read()
        return False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    finally:
        process.stderr.close()
