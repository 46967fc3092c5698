"""Read Qwen3-MoE weights for sampling from a checkpoint directory, dequantized and fused for `model.forward`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.checkpoints import WEIGHTS, check_checkpoint, expected_tensors
from contracts.errors import SchemaError
from contracts.qwen3_moe import Architecture
from contracts.tensor_files import TensorFiles, is_finite
from inference.errors import EngineError


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, float32."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(heads + 2 kv_heads) * head_dim, hidden]"""
    qk_norm: Tensor
    """[heads + kv_heads, head_dim]: the q norm repeated, then the k norm."""
    output: Tensor
    """[hidden, heads * head_dim]"""
    post_norm: Tensor
    """[hidden]"""
    router: Tensor
    """[experts, hidden]"""
    gate_up: Tensor
    """[experts, hidden, 2 * expert_width]"""
    down: Tensor
    """[experts, expert_width, hidden]"""


@dataclass(frozen=True)
class Weights:
    """Weights of a policy for sampling. Immutable: a reload creates a new object."""

    architecture: Architecture
    embedding: Tensor
    """[vocabulary, hidden]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[hidden]"""
    head: Tensor
    """[vocabulary, hidden]; the embedding itself if tied"""


def read_weights(directory: Path) -> Weights:
    """Load a checkpoint: FP8 blocks (recipe `w8`: weight = code * scale) or unquantized tensors of any float type
    (recipe `full`).

    Raises SchemaError for a missing or malformed tensor, EngineError for a checkpoint that this engine can't run.
    """
    architecture = read_architecture(_read_config(directory), directory)
    checkpoint = PlainTensors(directory)
    layers = tuple(_layer(checkpoint, architecture, index) for index in range(architecture.layers))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    head = embedding if architecture.tied else checkpoint.tensor("lm_head.weight")
    return Weights(architecture, embedding, layers, checkpoint.tensor("model.norm.weight"), head)


def read_architecture(config: dict[str, Any], directory: Path) -> Architecture:
    """Architecture in a config.json. Raises EngineError with the first feature that this engine lacks."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unsupported = {
        "hidden_act other than silu": config.get("hidden_act", "silu") != "silu",
        "attention_bias": config.get("attention_bias", False),
        "sliding windows": config.get("use_sliding_window", False),
        "dense layers (mlp_only_layers, decoder_sparse_step)": (
            config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        ),
        "scaled rotary embeddings": rope.get("rope_type", rope.get("type", "default")) != "default",
    }
    for feature, present in unsupported.items():
        if present:
            raise EngineError(
                f"{directory}/config.json asks for {feature}: the built-in engine does not support it, use vLLM"
            )
    try:
        return Architecture.from_config(config)
    except SchemaError as error:
        raise SchemaError(f"{directory}/{error}") from None


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise SchemaError(f"{directory} has no config.json: is it a checkpoint directory?")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SchemaError(f"{path} is not JSON ({error}): export the checkpoint again") from None
    if config.get("model_type", "qwen3_moe") != "qwen3_moe":
        raise EngineError(f"{path} is a {config['model_type']} model: the built-in engine runs qwen3_moe, use vLLM")
    return config


class PlainTensors:
    """Weights of a checkpoint directory: float32, dequantized, finite and of the expected shape, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises SchemaError, EngineError."""
        self._directory, self.config = directory, _read_config(directory)
        self._quantized = "quantization_config" in self.config
        if self._quantized:
            check_checkpoint(directory)
        self._files = TensorFiles(directory, WEIGHTS)
        expected = expected_tensors({"tie_word_embeddings": False, **self.config})
        self.shapes = {name: shape for name, (_, shape) in expected.items() if not name.endswith("_scale_inv")}
        """Shape of every weight by name."""
        for name, shape in self.shapes.items():
            have = self._files.forms[name][1] if name in self._files.forms else "absent"
            if have != shape:
                raise SchemaError(f"checkpoint {directory}: tensor {name} is {have}, expected {shape}")

    def tensor(self, name: str) -> Tensor:
        """A weight. Raises SchemaError if it is damaged, EngineError if it is not finite."""
        raw, scale = self._files.tensor(name), f"{name}_scale_inv"
        coded = self._quantized and scale in self._files.forms
        found = dequantize_blockwise(raw, self._files.tensor(scale)) if coded else raw.float()
        if not is_finite(found):
            raise EngineError(
                f"checkpoint {self._directory}: tensor {name} is not finite; its training diverged, don't serve it"
            )
        return found


def _layer(checkpoint: PlainTensors, shape: Architecture, index: int) -> LayerWeights:
    def get(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{index}.{name}.weight")

    def experts(*names: str) -> Tensor:
        stack: Tensor | None = None
        for expert in range(shape.experts):
            matrix = torch.cat([get(f"mlp.experts.{expert}.{name}_proj") for name in names]).T
            stack = torch.empty(shape.experts, *matrix.shape) if stack is None else stack
            stack[expert] = matrix
        assert stack is not None, "a layer has experts"
        return stack

    norms = [get("self_attn.q_norm").expand(shape.heads, -1), get("self_attn.k_norm").expand(shape.kv_heads, -1)]
    return LayerWeights(
        input_norm=get("input_layernorm"),
        qkv=torch.cat([get(f"self_attn.{name}_proj") for name in ("q", "k", "v")]),
        qk_norm=torch.cat(norms).contiguous(),
        output=get("self_attn.o_proj"),
        post_norm=get("post_attention_layernorm"),
        router=get("mlp.gate"),
        gate_up=experts("gate", "up"),
        down=experts("down"),
    )
