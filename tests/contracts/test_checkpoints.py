"""A checkpoint directory is checked tensor by tensor against its own config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contracts.checkpoints import check_checkpoint, expected_tensors, quantization_config
from contracts.errors import SchemaError

CONFIG = {
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "num_hidden_layers": 1,
    "vocab_size": 300,
    "tie_word_embeddings": False,
}
DTYPES = {"F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape).to(DTYPES[dtype]) for name, (dtype, shape) in expected_tensors(CONFIG).items()}


def save(directory: Path, found: dict[str, torch.Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(found, str(directory / "model.safetensors"))
    return directory


def test_complete_checkpoint_is_accepted(tmp_path: Path) -> None:
    assert check_checkpoint(save(tmp_path, tensors()))["num_experts"] == 2


def test_scales_cover_edge_blocks() -> None:
    expected = expected_tensors(CONFIG)
    assert expected["model.layers.0.mlp.experts.1.down_proj.weight_scale_inv"] == ("F32", (1, 2))
    assert expected["model.layers.0.self_attn.k_proj.weight"] == ("F8_E4M3", (64, 128))
    assert "model.layers.0.mlp.gate" in quantization_config(CONFIG)["ignored_layers"]


def test_faults_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    lacking = {key: value for key, value in tensors().items() if key != name}
    with pytest.raises(SchemaError, match=f"lacks tensor {name}"):
        check_checkpoint(save(tmp_path, lacking))
    with pytest.raises(SchemaError, match=f"{name} is"):
        check_checkpoint(save(tmp_path, {**tensors(), name: torch.zeros(192, 128)}))
    with pytest.raises(SchemaError, match="does not name: extra"):
        check_checkpoint(save(tmp_path, {**tensors(), "extra": torch.zeros(1)}))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SchemaError, match="not a readable safetensors"):
        check_checkpoint(tmp_path)
    with pytest.raises(SchemaError, match="no config"):
        check_checkpoint(tmp_path / "absent")
