"""Policies for measurements: random weights in the checkpoint layout, and the same weights for plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.checkpoints import WEIGHTS
from trainer.export import checkpoint_tensors
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters


def write_random_policy(directory: Path, model: ModelConfig, *, vocabulary: int, seed: int = 0) -> Path:
    """Write an untrained checkpoint of this shape, which costs the same to run as a trained one."""
    config = model.hf_config(vocabulary)
    directory.mkdir(parents=True)
    tensors = checkpoint_tensors(Parameters.from_masters(config, draw_masters(config, seed)))
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def dequantize_policy(directory: Path, target: Path) -> Path:
    """Write the same policy in float32, for `from_pretrained` on a CPU."""
    tensors = load_file(directory / WEIGHTS)
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv"):
            scale = tensors.get(f"{name}_scale_inv")
            plain[name] = (tensor if scale is None else dequantize_blockwise(tensor, scale)).contiguous()
    target.mkdir(parents=True)
    save_file(plain, target / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target
