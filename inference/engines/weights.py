"""Read Qwen3-MoE weights for sampling from a checkpoint directory, dequantized and fused for `model.forward`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.checkpoints import WEIGHTS, check_checkpoint, expected_tensors
from contracts.errors import SchemaError
from contracts.qwen3_moe import Architecture
from inference.errors import EngineError

INDEX = "model.safetensors.index.json"


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
    _, tensors = read_tensors(directory)
    layers = tuple(_layer(tensors, architecture, index) for index in range(architecture.layers))
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if architecture.tied else tensors["lm_head.weight"]
    return Weights(architecture, embedding, layers, tensors["model.norm.weight"], head)


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


def read_tensors(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and all weights by name: float32, dequantized, finite and of the expected shape.

    Raises SchemaError, EngineError.
    """
    config = _read_config(directory)
    quantized = "quantization_config" in config
    if quantized:
        check_checkpoint(directory)
    raw: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                raw |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise SchemaError(f"{path} is not a readable safetensors file ({error}): export it again") from None
    found: dict[str, Tensor] = {}
    for name, (_, shape) in expected_tensors({"tie_word_embeddings": False, **config}).items():
        if name.endswith("_scale_inv"):
            continue
        if name not in raw or tuple(raw[name].shape) != shape:
            have = tuple(raw[name].shape) if name in raw else "absent"
            raise SchemaError(f"checkpoint {directory}: tensor {name} is {have}, expected {shape}")
        scale = raw.get(f"{name}_scale_inv") if quantized else None
        found[name] = raw[name].float() if scale is None else dequantize_blockwise(raw[name], scale)
        if not bool(torch.isfinite(found[name]).all()):
            raise EngineError(
                f"checkpoint {directory}: tensor {name} is not finite; its training diverged, don't serve it"
            )
    return config, found


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        return [directory / WEIGHTS]
    names = json.loads(index.read_text())["weight_map"].values()
    return [directory / name for name in sorted(set(names))]


def _layer(tensors: dict[str, Tensor], shape: Architecture, index: int) -> LayerWeights:
    def get(name: str) -> Tensor:
        return tensors[f"model.layers.{index}.{name}.weight"]

    def experts(*names: str) -> Tensor:
        stacks = [
            torch.cat([get(f"mlp.experts.{expert}.{name}_proj") for name in names]) for expert in range(shape.experts)
        ]
        return torch.stack(stacks).transpose(1, 2).contiguous()

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
