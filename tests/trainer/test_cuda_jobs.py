"""Jobs on a GPU, against the same jobs on the CPU; `make test-gpu`. With TRIPLANE_TEST_DEVICE=cpu they run anywhere,
which tests these tests.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from test_backends import losses, policy_job, run_in_ranks, tensors_of
from test_trainer_ranks import start
from trainer_world import World

from contracts.artifacts import ArtifactRef, open_artifact
from contracts.checkpoints import WEIGHTS
from contracts.failpoints import KILL_VARIABLE
from trainer.config import RlJob, SftJob, parse_job
from trainer.result import TrainResult
from trainer.run import run_job

DEVICE = os.environ.get("TRIPLANE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240, method="thread"),
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch"},
    "fsdp2": {"backend": "fsdp2", "activation_checkpointing": True},
    "zero2": {"backend": "deepspeed", "zero_stage": 2},
    "zero3": {"backend": "deepspeed", "zero_stage": 3},
}
RECIPES: dict[str, dict[str, Any]] = {
    "w8": {"kind": "w8"},
    "fp32": {"kind": "fp32"},
    "bf16": {"kind": "bf16"},
    "fp8-block": {"kind": "fp8-block", "activations": "bfloat16", "router_dtype": "bfloat16"},
}
ALGORITHMS: dict[str, dict[str, Any]] = {"grpo": {}, "ppo": {"algorithm": {"kind": "ppo"}}}


def on_device(job: SftJob | RlJob, backend: str, key: str = "1" * 64) -> SftJob | RlJob:
    """The same job on the device under test, for another result."""
    return parse_job(json.dumps(job.model_dump(mode="json") | BACKENDS[backend] | {"device": DEVICE, "key": key}))


def warm_start(world: World, recipe: str) -> SftJob:
    job = world.sft_job("cpu", router_balance=0.01)
    made = parse_job(json.dumps(job.model_dump(mode="json") | {"precision": RECIPES[recipe]}))
    assert isinstance(made, SftJob)
    return made


def iteration(world: World, base: TrainResult, algorithm: str) -> RlJob:
    return policy_job(world, base, "cpu", learning_rate=1e-3, optimizer_steps=2, **ALGORITHMS[algorithm])


def require_equal(world: World, ours: ArtifactRef, theirs: ArtifactRef, first: float, later: float) -> None:
    """Compare losses, and dtypes and shapes of the exported weights. first, later: relative tolerances of losses."""
    one, other = losses(world, ours), losses(world, theirs)
    assert one[0] == pytest.approx(other[0], rel=first, abs=first) and one == pytest.approx(other, rel=later, abs=later)
    made = [tensors_of(open_artifact(world.store, ref), WEIGHTS) for ref in (ours, theirs)]
    forms = [{name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} for tensors in made]
    assert forms[0] == forms[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_warm_start_has_the_losses_of_the_cpu(world: World, recipe: str) -> None:
    job = warm_start(world, recipe)
    expected = run_job(job)
    assert expected is not None
    found = run_in_ranks(on_device(job, "torch"))
    tolerances = (1e-5, 0.02) if recipe in ("w8", "fp32") else (0.02, 0.05)
    require_equal(world, found["checkpoint"], expected.checkpoint, *tolerances)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_iteration_has_the_losses_of_the_cpu(world: World, backend: str, algorithm: str) -> None:
    base = run_job(world.sft_job("base", max_steps=20))
    assert base is not None
    job = iteration(world, base, algorithm)
    expected = run_job(job)
    assert expected is not None
    found = run_in_ranks(on_device(job, backend))
    require_equal(world, found["checkpoint"], expected.checkpoint, 1e-4, 0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_job_continues_from_its_snapshot(world: World, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = on_device(world.sft_job("killed", max_steps=6, snapshot_every=2), backend)
    whole = run_in_ranks(on_device(job, backend, key="2" * 64))
    monkeypatch.setenv(KILL_VARIABLE, "snapshot-committed")
    agent = start(job)
    agent.communicate(timeout=200)
    assert agent.returncode != 0
    monkeypatch.delenv(KILL_VARIABLE)
    require_equal(world, run_in_ranks(job)["checkpoint"], whole["checkpoint"], 1e-5, 0.02)
