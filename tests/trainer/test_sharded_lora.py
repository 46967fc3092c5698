"""LoRA on backends that divide the model: the gradient, the files and the state of the default backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_backends import (
    BACKENDS,
    EXPERTS,
    STILL,
    difference,
    kill_at_step_8,
    moments,
    policy_job,
    run_in_ranks,
    with_backend,
)
from test_trainer_ranks import start
from trainer_world import World

from contracts.adapters import ADAPTER_WEIGHTS, FOLDER, read_adapter
from contracts.artifacts import ArtifactRef, open_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from trainer.config import LoraConfig, RlJob
from trainer.errors import TrainingConfigError
from trainer.result import TrainResult
from trainer.run import run_job

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = {"rank": 4, "alpha": 8.0, "targets": ALL}
MOVING: dict[str, Any] = {"lora": LORA, "learning_rate": 1e-2, "optimizer_steps": 2, "max_gradient_norm": 1.0}


@pytest.fixture
def base(world: World) -> TrainResult:
    found = run_job(world.sft_job("base", max_steps=40))
    assert found is not None
    return found


def factors(world: World, checkpoint: ArtifactRef) -> dict[str, torch.Tensor]:
    return load_file(open_artifact(world.store, checkpoint).directory() / FOLDER / ADAPTER_WEIGHTS)


def continued(world: World, name: str, first: RlJob, begin: dict[str, ArtifactRef], **config: Any) -> RlJob:
    dataset = open_artifact(world.store, first.dataset)
    return world.rl_job(name, dataset, begin["checkpoint"], begin["trainer_state"], **(STILL | MOVING | config))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_trains_continues_and_is_exported_as_by_the_default_backend(
    world: World, base: TrainResult, backend: str
) -> None:
    first = policy_job(world, base, "first", **MOVING)
    begin = run_in_ranks(with_backend(first, 2, **BACKENDS[backend]))
    plain = run_job(policy_job(world, base, "plain", **MOVING))
    assert plain is not None
    wholes = {"checkpoint": plain.checkpoint, "trainer_state": plain.trainer_state}
    for found in (begin, wholes):
        assert any(each.any() for name, each in factors(world, found["checkpoint"]).items() if ".lora_B." in name)
    ours, theirs = (factors(world, found["checkpoint"]) for found in (begin, wholes))
    assert list(ours) == list(theirs)
    for name, factor in theirs.items():
        apart = (ours[name] - factor).abs()
        # AdamW divides by tiny gradients of single elements, whose rounding differs with the order of sums
        assert float(apart.square().mean().sqrt()) < 1e-5 and float(apart.max()) < MOVING["learning_rate"] / 50, name
    directory = open_artifact(world.store, begin["checkpoint"]).directory()
    assert (directory / WEIGHTS).read_bytes() == open_artifact(world.store, base.checkpoint).path(WEIGHTS).read_bytes()
    assert read_adapter(directory, check_checkpoint(directory)) == LoraConfig(**LORA).adapter

    # the next iteration, on this backend and on the default one: the same gradient of the same factors
    still = {"learning_rate": 0.0, "optimizer_steps": 1, "max_gradient_norm": 1e9}
    here = run_in_ranks(with_backend(continued(world, "here", first, begin, **still), 2, **BACKENDS[backend]))
    there = run_job(continued(world, "there", first, begin, **still))
    assert there is not None
    assert difference(moments(world, here["trainer_state"]), moments(world, there.trainer_state)) < 1e-5
    assert factors(world, here["checkpoint"]).keys() == theirs.keys()


@pytest.mark.slow
def test_a_killed_job_continues_the_adapter_of_its_snapshot(world: World, base: TrainResult) -> None:
    begin = {"checkpoint": base.checkpoint, "trainer_state": base.trainer_state, "lora": LoraConfig(**LORA)}
    config = {"max_steps": 12, "evaluate_every": 4, "snapshot_every": 4}
    whole, job = (
        with_backend(world.sft_job(name, **config).model_copy(update=begin), 2, **EXPERTS) for name in ("whole", "job")
    )
    undisturbed = run_in_ranks(whole)
    kill_at_step_8(job)
    assert run_in_ranks(job)["checkpoint"].digest == undisturbed["checkpoint"].digest
    weights = [open_artifact(world.store, each).path(WEIGHTS) for each in (base.checkpoint, undisturbed["checkpoint"])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    moved = factors(world, undisturbed["checkpoint"])
    assert any(moved[name].any() for name in moved if ".lora_B." in name)


@pytest.mark.slow
def test_deepspeed_says_that_it_has_nothing_to_train(world: World, base: TrainResult) -> None:
    job = policy_job(world, base, "experts", **(MOVING | {"lora": LORA | {"targets": ("up_proj",)}}))
    agent = start(with_backend(job, 2, **BACKENDS["zero2-experts"]))
    said = agent.communicate(timeout=240)[1].splitlines()[-1]
    assert agent.returncode and "add a projection of the attention to trainer.lora.targets" in said


@pytest.mark.slow
def test_a_sharded_adapter_is_refused_where_the_default_backend_refuses_it(world: World, base: TrainResult) -> None:
    first = run_job(policy_job(world, base, "first", **MOVING))
    assert first is not None
    wholes = {"checkpoint": first.checkpoint, "trainer_state": first.trainer_state}
    other = continued(world, "other", policy_job(world, base, "data"), wholes, lora=LORA | {"rank": 8})
    with pytest.raises(TrainingConfigError, match=r"has an adapter of rank 4, alpha 8, targets q_proj.*: set trainer"):
        run_job(with_backend(other, 1, backend="fsdp2"))
