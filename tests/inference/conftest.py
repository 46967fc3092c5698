"""A tiny random policy, written as the trainer would write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from triplane_kernels.blockwise import quantize_blockwise

from contracts.checkpoints import WEIGHTS, expected_tensors, is_quantized, quantization_config
from inference.engines.kv import KvCache
from inference.engines.model import Rotary, forward, logits_of, make_batch
from inference.engines.weights import read_weights

TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

WritePolicy = Callable[..., Path]


def write_checkpoint(directory: Path, seed: int, **changes: Any) -> Path:
    """An FP8 checkpoint of random weights. changes: entries of config.json."""
    config = TINY | changes
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (_, shape) in expected_tensors(config).items():
        if name.endswith("_scale_inv"):
            continue
        noise = torch.randn(shape, generator=random)
        weight = 1 + 0.1 * noise if "norm" in name else noise * (0.15 if "embed" in name or "gate.w" in name else 0.09)
        if is_quantized(name):
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_blockwise(weight)
        else:
            tensors[name] = weight
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    config["quantization_config"] = quantization_config(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoint_writer() -> WritePolicy:
    """checkpoint_writer(directory, seed, **changes of config.json) -> directory"""
    return write_checkpoint


@pytest.fixture
def write_policy(tmp_path: Path) -> WritePolicy:
    """write_policy(name, seed=..., **changes of config.json) -> directory"""

    def write(name: str, *, seed: int = 0, **changes: Any) -> Path:
        return write_checkpoint(tmp_path / name, seed, **changes)

    return write


@pytest.fixture
def policy(write_policy: WritePolicy) -> Path:
    return write_policy("policy")


@pytest.fixture
def other_policy(write_policy: WritePolicy) -> Path:
    return write_policy("other", seed=1)


def break_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first step of every engine fail."""

    def full(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("inference.engines.scheduler.forward", full)


def logits_after(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """float64 logits [tokens, vocabulary] that a policy draws each of `tokens` from, after `prompt`."""
    weights, context = read_weights(directory), np.array([*prompt, *tokens])
    cache = KvCache(weights.architecture)
    cache.reserve(1, len(context) + 8)
    batch = make_batch(0, [context], np.zeros(1, np.int64))
    hidden = forward(weights, cache, Rotary(weights.architecture), batch)
    return logits_of(weights, hidden[len(prompt) - 1 : len(context) - 1]).double()
