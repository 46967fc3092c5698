"""The trainer's path to a GPU, on fake tensors: torch's own mode computes shapes, dtypes and devices without the
device, and refuses products of tensors on two of them. What runs only on a GPU is in test_cuda_jobs.py.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from trainer_world import TINY

from contracts.adapters import Adapter
from contracts.architectures import parameter_shapes
from resources.errors import ExperimentError
from resources.experiment import parse_experiment
from resources.gpus import local_gpus
from resources.launcher import local_refusal
from trainer.adapters import adapt, draw_factors
from trainer.algorithms.ppo import Ppo
from trainer.backends.base import AdamWRule, MuonRule, Rule
from trainer.backends.torch import TorchBackend
from trainer.config import RlConfig
from trainer.critic import Critic
from trainer.data import ScoredSequence
from trainer.devices import open_device
from trainer.errors import TrainingConfigError
from trainer.export import checkpoint_tensors
from trainer.model import Batch, Scores
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters
from trainer.precision import with_precision
from trainer.ranks import Ranks

ELSEWHERE = torch.device("meta")
"""A device that this build of torch knows and that is not the CPU."""
DENSE = ModelConfig(family="qwen3", hidden_size=128, layers=2, mlp_width=128, heads=4, kv_heads=2, head_dim=64)
FP8 = {"kind": "fp8-block", "activations": "bfloat16", "router_dtype": "bfloat16"}
SEQUENCES = [
    ScoredSequence(np.arange(9) % 7, np.arange(3, 9)),
    ScoredSequence(np.arange(5) % 7, np.arange(2, 5)),
]


@contextmanager
def faked() -> Iterator[None]:
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes):
        yield


def parameters_of(model: ModelConfig, precision: dict[str, Any]) -> Parameters:
    config = with_precision(model.hf_config(256), RlConfig.model_validate({"precision": precision}).precision)
    return Parameters.from_masters(config, {name: torch.empty(s) for name, s in parameter_shapes(config).items()})


def places(tensors: dict[str, Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors.values()}


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        (DENSE, {"kind": "w8"}),
        (DENSE, {"kind": "fp32"}),
        (DENSE, {"kind": "bf16"}),
        (DENSE, {"kind": "w8a8-1x128"}),
        (DENSE, FP8),
        (TINY, FP8),
    ],
)
@pytest.mark.parametrize("rule", [AdamWRule(0.9, 0.95, 0.1), MuonRule(0.5)])
def test_a_step_computes_on_the_ranks_device_and_its_loss_on_the_cpu(
    model: ModelConfig, precision: dict[str, Any], rule: Rule
) -> None:
    seen: list[tuple[str, str, str]] = []

    def loss(number: int, batch: Batch, scores: Scores) -> Tensor:
        seen.append((scores.logprobs.device.type, batch.owners.device.type, scores.hidden.device.type))
        whole = -scores.logprobs.sum()
        return whole if scores.routing is None else whole + scores.routing.probabilities.sum()

    with faked():
        backend = TorchBackend(parameters_of(model, precision), rule, Ranks(device=ELSEWHERE))
        backend.clear_gradients()
        backend.forward_backward([SEQUENCES], loss, 0.7, routing=model is TINY)
        backend.optim_step(1e-3, 1.0)
        backend.average_weights()
        backend.use_average()
        backend.forward([SEQUENCES], lambda number, batch, scores: None)
        state = backend.save(1, {}, {}).result()
        weights = dict(backend.parameters.masters()) | checkpoint_tensors(backend.parameters)
        assert places(weights) == {ELSEWHERE.type}
        assert seen == [("cpu", "cpu", ELSEWHERE.type)]
        copied = state.copied()
        assert places(dict(copied.masters) | dict(copied.optimizer)) == {"cpu"}, "a snapshot takes no GPU memory"
        backend.load_weights(copied.masters)
        backend.restore(copied)


def test_adapters_and_the_value_head_work_from_another_device() -> None:
    adapter = Adapter(4, 8.0, ("q_proj", "v_proj"))
    algorithm = RlConfig.model_validate({"algorithm": {"kind": "ppo"}}).algorithm
    assert isinstance(algorithm, Ppo)
    with faked():
        base = parameters_of(DENSE, {"kind": "w8"})
        factors = {name: torch.empty_like(f) for name, f in draw_factors(base.config, adapter, 0).items()}
        backend = TorchBackend(adapt(base, adapter, factors), AdamWRule(0.9, 0.95, 0.0), Ranks(device=ELSEWHERE))
        critic = Critic(algorithm, 128, 0.9, 0.95, {})

        def loss(number: int, batch: Batch, scores: Scores) -> Tensor:
            critic.values(scores.hidden).sum().backward()
            return -scores.logprobs.sum()

        backend.forward_backward([SEQUENCES], loss)
        backend.optim_step(1e-3, 1.0)
        critic.step()
        assert places(dict(backend.parameters.masters())) == {ELSEWHERE.type}
        assert places(critic.state()) == {"cpu"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_job_for_a_gpu_says_what_is_missing() -> None:
    with pytest.raises(TrainingConfigError, match=r"finds 0 GPU\(s\) here and rank 0 .* set trainer\.launcher\.gpus"):
        open_device("cuda")


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put an nvidia-smi on PATH that prints `text`."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_counted_as_cuda_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{number}, GPU-{number}ab-cd, NVIDIA H200, 143771\n" for number in range(4)]
    driver(tmp_path, monkeypatch, "".join(lines))
    for visible, count in ((None, 4), ("", 0), ("0,2", 2), ("-1", 0), ("1,9,2", 1), ("GPU-3ab", 1), ("GPU-9", 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert local_gpus() == [("NVIDIA H200", 143771 << 20)] * count, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert local_refusal(1, 2) is None
    assert "gpus=3: this machine has 2 NVIDIA GPU(s)" in str(local_refusal(1, 3))
    driver(tmp_path, monkeypatch, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert local_gpus() == []


def test_one_rank_for_each_gpu_and_the_device_in_the_key() -> None:
    def launcher(**values: Any) -> Any:
        return parse_experiment({"name": "one", "trainer": {"launcher": values}}).trainer.launcher

    assert launcher(gpus=8).job_fields["ranks"] == 8 and launcher(gpus=8).job_fields["device"] == "cuda"
    assert launcher(ranks=2).job_fields["ranks"] == 2 and launcher(ranks=2).job_fields["device"] == "cpu"
    assert launcher(gpus=1).numerics != launcher().numerics
    with pytest.raises(ExperimentError, match="ranks 2 is for machines without GPUs"):
        launcher(gpus=8, ranks=2)
