"""FSDP2 and DeepSpeed against the default backend: the same gradient, losses, weights and state, on any ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_ranks import start
from test_trainer_resume import state_alone
from test_trainer_rl import own_dataset
from trainer_world import QUICKSTART, World

from contracts.artifacts import Artifact, ArtifactRef, discard_artifact, find_artifact, open_artifact
from contracts.checkpoints import WEIGHTS
from contracts.tensor_files import TensorFiles
from tests.torchrun import torchrun
from trainer.config import RlJob, SftJob, parse_job
from trainer.errors import TrainingConfigError
from trainer.result import TrainResult
from trainer.rl import minibatches
from trainer.run import run_job
from trainer.state import STATE

STILL = {
    "learning_rate": 0.0,
    "optimizer_steps": 1,
    "max_gradient_norm": 1e9,
    "microbatch_tokens": 64,
    "router_balance": 0.1,
    "algorithm": QUICKSTART,
}
FSDP2 = {"backend": "fsdp2"}


def with_backend(job: SftJob | RlJob, ranks: int, **backend: Any) -> SftJob | RlJob:
    return parse_job(json.dumps(job.model_dump(mode="json") | backend | {"ranks": ranks}))


def run_in_ranks(job: SftJob | RlJob) -> dict[str, ArtifactRef]:
    """References that a job of its own processes published."""
    agent = start(job)
    try:
        out, err = agent.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        agent.terminate()
        raise AssertionError(agent.communicate()[1]) from None
    assert agent.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    return {name: ArtifactRef(**result[name]) for name in ("checkpoint", "trainer_state")}


def kill_at_step_8(job: SftJob | RlJob) -> None:
    agent = start(job)
    assert agent.stderr is not None
    while "step 8," not in (line := agent.stderr.readline()):
        assert line, "the job ended too early"
    agent.kill()
    agent.communicate()


def tensors_of(artifact: Artifact, name: str) -> dict[str, torch.Tensor]:
    files = TensorFiles(artifact.directory(), name)
    return {tensor: files.tensor(tensor) for tensor in files.forms}


def moments(world: World, state: ArtifactRef) -> torch.Tensor:
    """AdamW's first moments, end to end: a tenth of the gradient after the first step."""
    found = tensors_of(open_artifact(world.store, state), STATE)
    return torch.cat([found[name].reshape(-1) for name in sorted(found) if ".exp_avg." in name])


def losses(world: World, checkpoint: ArtifactRef) -> list[float]:
    lines = open_artifact(world.store, checkpoint).path("metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def policy_job(world: World, base: TrainResult, name: str, **config: Any) -> RlJob:
    return world.rl_job(name, own_dataset(world, base), base.checkpoint, base.trainer_state, **(STILL | config))


def test_one_process_of_fsdp2_trains_as_the_default_backend(world: World) -> None:
    expected = run_job(world.sft_job("torch"))
    found = run_job(with_backend(world.sft_job("fsdp2"), 1, **FSDP2))
    assert expected is not None and found is not None
    ours, theirs = losses(world, found.checkpoint), losses(world, expected.checkpoint)
    # later losses differ more: a rounding of 1e-7 moves single FP8 codes, by 6% of a weight each
    assert len(ours) == 6 and ours[0] == pytest.approx(theirs[0], rel=1e-6) and ours == pytest.approx(theirs, rel=1e-2)
    numerics = open_artifact(world.store, found.checkpoint).manifest.config["numerics"]
    assert numerics["backend"] == "fsdp2"
    one, other = (tensors_of(open_artifact(world.store, r.checkpoint), WEIGHTS) for r in (found, expected))
    assert {n: (t.dtype, t.shape) for n, t in one.items()} == {n: (t.dtype, t.shape) for n, t in other.items()}


@pytest.mark.slow
def test_a_supervised_job_of_fsdp2_starts_from_the_weights_of_a_checkpoint(world: World) -> None:
    base = run_job(world.sft_job("base", max_steps=20))
    assert base is not None
    begin = {"checkpoint": base.checkpoint, "trainer_state": base.trainer_state}
    expected, found = (
        run_job(with_backend(world.sft_job(name, max_steps=2).model_copy(update=begin), 1, **settings))
        for name, settings in (("torch", {}), ("fsdp2", FSDP2))
    )
    assert expected is not None and found is not None
    ours, theirs = losses(world, found.checkpoint), losses(world, expected.checkpoint)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6) and ours == pytest.approx(theirs, rel=1e-2)


EXPERTS = FSDP2 | {"expert_ranks": 2}
BACKENDS = {
    "fsdp2": FSDP2,
    "experts": EXPERTS,
    "zero1-experts": {"backend": "deepspeed", "zero_stage": 1, "expert_ranks": 2},
    "zero2-experts": {"backend": "deepspeed", "zero_stage": 2, "expert_ranks": 2},
    **{f"zero{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_is_that_of_one_process_on_any_number_of_ranks(world: World, backend: str) -> None:
    base = run_job(world.sft_job("base", max_steps=40))
    assert base is not None
    whole = run_job(policy_job(world, base, "whole", microbatch_tokens=4096))
    assert whole is not None
    expected = moments(world, whole.trainer_state)
    assert float(expected.norm()) > 0
    spreads = [(count, BACKENDS[backend]) for count in (1, 2, 4)]
    if "experts" in backend:
        four = [(4, EXPERTS)] if backend == "experts" else []
        spreads = [(2, BACKENDS[backend]), *four, (4, BACKENDS[backend] | {"expert_ranks": 4})]
    for number, (count, settings) in enumerate(spreads):
        job = with_backend(policy_job(world, base, f"shared-{number}"), count, **settings)
        assert difference(moments(world, run_in_ranks(job)["trainer_state"]), expected) < 1e-5


@pytest.mark.slow
def test_ranks_that_divide_experts_compute_the_mixture_of_one_rank(tmp_path: Path) -> None:
    assert torchrun(Path(__file__).parent / "expert_ranks.py", 2, tmp_path).count("the same: ") == 9


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fifty_steps_have_the_losses_of_the_default_backend(world: World, backend: str) -> None:
    config = {"max_steps": 50, "evaluate_every": 25, "snapshot_every": 100, "router_balance": 0.01}
    expected = run_job(world.sft_job("torch", **config))
    assert expected is not None
    job = with_backend(world.sft_job(backend, **config), 2, **BACKENDS[backend])
    ours, theirs = losses(world, run_in_ranks(job)["checkpoint"]), losses(world, expected.checkpoint)
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    print(backend, worst)
    assert len(ours) == 50 and ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert worst < 0.05


@pytest.mark.slow
def test_a_state_continues_on_any_backend_and_number_of_ranks(world: World) -> None:
    base = run_job(world.sft_job("base", max_steps=40))
    assert base is not None
    moving = {"learning_rate": 1e-3, "optimizer_steps": 2, "max_gradient_norm": 1.0}
    first = policy_job(world, base, "first", **moving)
    dataset = open_artifact(world.store, first.dataset)
    begin = run_in_ranks(with_backend(first, 2, **FSDP2))
    found = {}
    for name, backend, count in (
        ("torch", {}, 1),
        ("fsdp2", FSDP2, 3),
        ("experts", EXPERTS, 2),
        *((f"zero{stage}", BACKENDS[f"zero{stage}"], stage) for stage in (1, 2, 3)),
    ):
        config = STILL | moving | {"optimizer_steps": 1}
        job = world.rl_job(f"next-{name}", dataset, begin["checkpoint"], begin["trainer_state"], **config)
        state = open_artifact(world.store, run_in_ranks(with_backend(job, count, **backend))["trainer_state"])
        found[name] = tensors_of(state, STATE)
    for name, tensors in found.items():
        assert float(tensors["adamw.step"]) == 3.0, name
        assert set(tensors) == set(found["torch"])
        for each, expected in found["torch"].items():
            assert difference(tensors[each], expected) < 1e-4, (name, each)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "experts", "zero1", "zero3"])
def test_ranks_export_the_weights_of_the_state_that_another_run_has_committed(world: World, backend: str) -> None:
    base = run_job(world.sft_job("base", max_steps=40))
    assert base is not None
    moving = {"learning_rate": 1e-3, "optimizer_steps": 2, "max_gradient_norm": 1.0}
    job = policy_job(world, base, "twice", **moving)
    state_alone(job)
    found = run_in_ranks(with_backend(job, 2, **BACKENDS[backend]))
    whole = run_job(policy_job(world, base, "whole", **moving))
    assert whole is not None
    assert (found["trainer_state"].digest, found["checkpoint"].digest) == (
        whole.trainer_state.digest,
        whole.checkpoint.digest,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_averaged_weights_are_those_of_the_default_backend(world: World, backend: str) -> None:
    target = {"expected_solve": 1e-9, "expected_form": 1e-9, "consecutive": 1, "average_steps": 3}
    expected = run_job(world.sft_job("torch", max_steps=20, **target))
    assert expected is not None and expected.metrics["converged"] and expected.metrics["step"] == 6
    found = run_in_ranks(with_backend(world.sft_job("averaged", max_steps=20, **target), 2, **BACKENDS[backend]))
    ours, theirs = (
        tensors_of(open_artifact(world.store, ref), STATE) for ref in (found["trainer_state"], expected.trainer_state)
    )
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert difference(ours[name], tensor) < 1e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["zero1", "zero2", "zero3"])
def test_gradients_of_a_minibatch_that_corrections_drop_are_forgotten(world: World, backend: str) -> None:
    base = run_job(world.sft_job("base", max_steps=40))
    assert base is not None
    whole = own_dataset(world, base)
    rows, members = (whole.table(f"{name}.parquet").to_pylist() for name in ("train", "members"))
    first = minibatches([row["group_index"] for row in rows], 2, 5)[0]
    for index in first:
        rows[index]["logprobs"] = [None if each is None else each - 1.0 for each in rows[index]["logprobs"]]
    dataset = world.dataset(rows, members)
    config = STILL | {"corrections": {"sequence_rejection": {"low": 0.5, "high": 2.0}}, "optimizer_steps": 2}
    jobs = [world.rl_job(name, dataset, base.checkpoint, base.trainer_state, **config) for name in ("torch", backend)]
    expected = run_job(jobs[0])
    assert expected is not None and expected.metrics["skipped_steps"] == 1
    found = run_in_ranks(with_backend(jobs[1], 2, **BACKENDS[backend]))
    assert difference(moments(world, found["trainer_state"]), moments(world, expected.trainer_state)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "experts", "zero3"])
def test_recomputed_activations_change_no_bit(world: World, backend: str) -> None:
    digests = set()
    for recompute in (False, True):
        settings = BACKENDS[backend] | {"activation_checkpointing": recompute}
        job = with_backend(world.sft_job(f"recompute-{recompute}"), 2, **settings)
        digests.add(run_in_ranks(job)["checkpoint"].digest)
    assert len(digests) == 1


@pytest.mark.slow
def test_a_killed_job_of_fsdp2_continues_from_the_snapshot_that_its_ranks_wrote(world: World) -> None:
    config = {"max_steps": 12, "evaluate_every": 4, "snapshot_every": 4}
    undisturbed = run_in_ranks(with_backend(world.sft_job("undisturbed", **config), 2, **FSDP2))
    job = with_backend(world.sft_job("killed", **config), 2, **FSDP2)
    kill_at_step_8(job)
    assert run_in_ranks(job)["checkpoint"].digest == undisturbed["checkpoint"].digest


@pytest.mark.slow
def test_ranks_give_a_checkpoint_no_state_of_other_weights(world: World) -> None:
    job = with_backend(world.sft_job("lone", max_steps=2, snapshot_every=100), 2, **FSDP2)
    before = run_in_ranks(job)
    discard_artifact(world.store, before["trainer_state"])
    agent = start(job.model_copy(update={"seed": job.seed + 1}))
    _, err = agent.communicate(timeout=240)
    assert agent.returncode == 1 and "has lost its trainer_state" in err.splitlines()[-1], err
    assert find_artifact(world.store, "trainer_state", job.key) is None
    assert run_in_ranks(job) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero_stage": 2}, "zero_stage 2 needs backend deepspeed, not torch: remove it"),
        ({"backend": "fsdp2", "zero_stage": 1}, "zero_stage 1 needs backend deepspeed, not fsdp2: remove it"),
        ({"activation_checkpointing": True}, "activation_checkpointing needs backend fsdp2 or deepspeed, not torch"),
        ({"backend": "megatron"}, "backend"),
        ({"expert_ranks": 2}, "expert_ranks 2 needs backend fsdp2 or deepspeed, not torch: remove it"),
        ({"expert_ranks": 2, "backend": "deepspeed", "zero_stage": 3}, "expert_ranks 2 does not go with zero_stage 3"),
        (EXPERTS, "expert_ranks 2 does not divide the 1 training processes: set it to a divisor"),
    ],
)
def test_settings_that_a_backend_lacks_are_refused(world: World, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingConfigError, match=words):
        with_backend(world.sft_job("refused"), 1, **fields)


def test_the_default_backend_adds_nothing_to_numerics(world: World) -> None:
    assert world.sft_job().numerics == {"backend": "torch", "device": "cpu", "threads": 1, "ranks": 1}
    deepspeed = with_backend(world.sft_job(), 2, backend="deepspeed", activation_checkpointing=True)
    assert deepspeed.numerics == {"backend": "deepspeed", "zero_stage": 2, "device": "cpu", "threads": 1, "ranks": 2}
