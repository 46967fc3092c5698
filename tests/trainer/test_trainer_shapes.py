"""Shapes whose FP8 blocks every loader reads alike, and the refusal of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from trainer_world import TINY

from contracts.architectures import expert_names
from contracts.checkpoints import is_quantized, ragged_sides
from contracts.store import open_store
from resources.errors import ExperimentError
from resources.experiment import parse_experiment
from trainer.errors import TrainingDataError
from trainer.export import checkpoint_tensors
from trainer.import_hf import import_checkpoint
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters

Fp8Dequantize = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize


def transformers_reads(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One exported weight as the operation that transformers loads FP8 checkpoints by makes it."""
    scales = tensors[f"{name}_scale_inv"]
    read = Fp8Dequantize(None).convert({"weight": [tensors[name]], "weight_scale_inv": [scales]}, full_layer_name=name)
    (found,) = read.values()
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("change", [{}, {"hidden_size": 256, "heads": 6, "kv_heads": 2, "expert_width": 384}])
def test_transformers_reads_every_exported_weight_as_the_trainer_does(change: dict[str, int]) -> None:
    config = ModelConfig(**(TINY.model_dump() | change)).hf_config(60)
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    tensors, checked = checkpoint_tensors(parameters), 0
    for name, leaf in parameters.leaves.items():
        if is_quantized(name):
            matrices = leaf.detach() if leaf.dim() == 3 else [leaf.detach()]
            for single, matrix in zip(expert_names(name, tuple(leaf.shape)), matrices, strict=True):
                assert torch.equal(transformers_reads(tensors, single), matrix), single
                checked += 1
    assert checked == config["num_hidden_layers"] * (4 + 3 * config["num_experts"])


def test_transformers_misreads_a_partial_block() -> None:
    config = {**TINY.hf_config(60), "num_attention_heads": 3, "num_key_value_heads": 1}
    assert ragged_sides(config) == {"num_attention_heads * head_dim": 192, "num_key_value_heads * head_dim": 64}
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    name = "model.layers.0.self_attn.q_proj.weight"
    read = transformers_reads(checkpoint_tensors(parameters), name)
    assert not torch.equal(read, parameters.leaves[name].detach())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 192}, "hidden_size = 192 is not a multiple of 128.*make it 256"),
        ({"expert_width": 48}, "expert_width = 48 is not a multiple of 128.*make it 128"),
        ({"heads": 3, "kv_heads": 1}, r"heads \* head_dim = 96 is not a multiple of 128.*make it 128"),
        ({"kv_heads": 2}, r"kv_heads \* head_dim = 64 is not a multiple of 128.*make it 128"),
    ],
)
def test_a_ragged_shape_is_refused_when_the_experiment_is_read(change: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelConfig(**change)
    with pytest.raises(ExperimentError, match=said):
        parse_experiment({"name": "ragged", "base": {"model": change}})


def test_a_ragged_checkpoint_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    config = {name: value for name, value in TINY.hf_config(60).items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 200}))
    with pytest.raises(TrainingDataError, match=r"config\.json: moe_intermediate_size = 200 is not a multiple of 128"):
        import_checkpoint(tmp_path, open_store(str(tmp_path / "store")))
