import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.checkpoints import WEIGHTS
from contracts.errors import SchemaError
from inference.engines.kv import KvCache
from inference.engines.model import Rotary, forward, logits_of, make_batch
from inference.engines.weights import read_weights
from inference.errors import EngineError


def dequantize(directory: Path) -> Path:
    """The same policy as plain float32 tensors, in a directory beside."""
    target = directory.with_name(directory.name + "-plain")
    target.mkdir()
    tensors = load_file(directory / WEIGHTS)
    plain = {
        name: dequantize_blockwise(tensor, tensors[f"{name}_scale_inv"]) if f"{name}_scale_inv" in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, target / WEIGHTS, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@torch.inference_mode()
def own_logits(directory: Path, tokens: list[list[int]]) -> list[torch.Tensor]:
    weights = read_weights(directory)
    cache = KvCache(weights.architecture)
    cache.reserve(len(tokens), 64)
    batch = make_batch(0, [np.array(part) for part in tokens], np.zeros(len(tokens), np.int64))
    logits = logits_of(weights, forward(weights, cache, Rotary(weights.architecture), batch))
    return list(logits[: batch.ends[-1]].split([len(part) for part in tokens]))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 2, "tie_word_embeddings": False, "norm_topk_prob": False},
        {"head_dim": 64, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "rope_theta": 1e6},
    ],
)
def test_logits_equal_those_of_transformers_on_the_dequantized_weights(
    write_policy: Callable[..., Path], changes: dict[str, Any]
) -> None:
    from transformers import Qwen3MoeForCausalLM  # takes seconds, also where no test of this file runs

    directory = write_policy("policy", seed=3, **changes)
    plain = dequantize(directory)
    reference = Qwen3MoeForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = [[(7 * i + j) % 96 for j in range(length)] for i, length in enumerate((1, 5, 23, 40))]
    for mine, also_mine, part in zip(own_logits(directory, tokens), own_logits(plain, tokens), tokens, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([part])).logits[0]
        assert (mine.log_softmax(-1) - theirs.log_softmax(-1)).abs().max() < 1e-5
        assert torch.equal(mine, also_mine)


def test_the_test_model_routes_to_different_experts(policy: Path) -> None:
    config = json.loads((policy / "config.json").read_text())
    assert config["num_experts_per_tok"] < config["num_experts"]
    first, second = own_logits(policy, [[1, 2, 3, 4], [9, 8, 7, 6]])
    assert (first - second).abs().max() > 0.1


def test_a_missing_tensor_is_named(policy: Path) -> None:
    tensors = load_file(policy / WEIGHTS)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, policy / WEIGHTS)
    with pytest.raises(SchemaError, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        read_weights(policy)


def test_a_tensor_that_is_not_finite_is_named(policy: Path) -> None:
    tensors = load_file(policy / WEIGHTS)
    tensors["model.norm.weight"][5] = float("nan")
    save_file(tensors, policy / WEIGHTS)
    with pytest.raises(EngineError, match=r"model\.norm\.weight is not finite"):
        read_weights(policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"mlp_only_layers": [0]}, "dense layers"),
    ],
)
def test_an_architecture_this_engine_lacks_is_refused_by_name(
    write_policy: Callable[..., Path], change: dict[str, Any], message: str
) -> None:
    directory = write_policy("policy", seed=0, **change)
    with pytest.raises(EngineError, match=message):
        read_weights(directory)
