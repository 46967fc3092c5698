"""Read weights for sampling from a checkpoint directory, dequantized and fused for `model.forward`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.adapters import adapter_files, added_weight, read_adapter
from contracts.architectures import CLASSES, Architecture, unsupported_feature
from contracts.checkpoints import WEIGHTS, check_checkpoint, expected_tensors
from contracts.errors import SchemaError
from contracts.precision import FORWARD, Forward, forward_of
from contracts.tensor_files import TensorFiles, is_finite
from inference.engines.numerics import Numerics
from inference.errors import EngineError


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, float32."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(heads + 2 kv_heads) * head_dim, hidden]"""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the q norm repeated, then the k norm. None in Llama."""
    output: Tensor
    """[hidden, heads * head_dim]"""
    post_norm: Tensor
    """[hidden]"""
    router: Tensor | None
    """[experts, hidden]; None in a dense model"""
    gate_up: Tensor
    """[experts, hidden, 2 * width]; dense: [2 * width, hidden]"""
    down: Tensor
    """[experts, width, hidden]; dense: [hidden, width]"""


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
    numerics: Numerics = field(default_factory=lambda: Numerics(Forward()))
    """Rounding of the forward pass."""


def read_weights(directory: Path) -> Weights:
    """Load a checkpoint: FP8 blocks (weight = code * scale) or unquantized tensors of any float type, with the recipe
    that its config.json names (`contracts.precision`).

    Raises SchemaError for a missing or malformed tensor, EngineError for a checkpoint that this engine can't run.
    """
    config = _read_config(directory)
    architecture = read_architecture(config, directory)
    numerics = Numerics(forward_of(config))
    checkpoint = PlainTensors(directory)
    layers = tuple(_layer(checkpoint, architecture, numerics, index) for index in range(architecture.layers))
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    head = embedding if architecture.tied else checkpoint.tensor("lm_head.weight")
    return Weights(architecture, embedding, layers, checkpoint.tensor("model.norm.weight"), head, numerics)


def read_architecture(config: dict[str, Any], directory: Path) -> Architecture:
    """Architecture in a config.json. Raises EngineError with the first feature that this engine lacks."""
    feature = unsupported_feature(config)
    if feature is not None:
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
        config: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise SchemaError(f"{path} is not JSON ({error}): export the checkpoint again") from None
    if config.get("model_type", "qwen3_moe") not in CLASSES:
        raise EngineError(
            f"{path} is a {config['model_type']} model: the built-in engine runs {', '.join(CLASSES)}; use vLLM"
        )
    return config


class PlainTensors:
    """Weights of a checkpoint directory: float32, dequantized, finite and of the expected shape, read one at a time.

    Its adapter, if it has one, is merged into them.
    """

    def __init__(self, directory: Path) -> None:
        """Raises SchemaError, EngineError."""
        self.directory, self.config = directory, _read_config(directory)
        self._quantized = "quantization_config" in self.config
        if self._quantized or FORWARD in self.config:
            check_checkpoint(directory)
        self._adapter = read_adapter(directory, self.config)
        self._added = adapter_files(directory) if self._adapter else None
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
        if self._adapter is not None and self._added is not None:
            added = added_weight(self._added, self._adapter, name)
            found = found if added is None else found + added
        if not is_finite(found):
            raise EngineError(
                f"checkpoint {self.directory}: tensor {name} is not finite; its training diverged, don't serve it"
            )
        return found


def _layer(checkpoint: PlainTensors, shape: Architecture, numerics: Numerics, index: int) -> LayerWeights:
    def get(name: str) -> Tensor:
        found = checkpoint.tensor(f"model.layers.{index}.{name}.weight")
        return numerics.projection(found) if name.endswith("_proj") else found

    def experts(*names: str) -> Tensor:
        stack: Tensor | None = None
        for expert in range(shape.experts):
            matrix = torch.cat([get(f"mlp.experts.{expert}.{name}_proj") for name in names]).T
            stack = torch.empty(shape.experts, *matrix.shape) if stack is None else stack
            stack[expert] = matrix
        assert stack is not None, "a layer has experts"
        return stack

    def dense(*names: str) -> Tensor:
        return torch.cat([get(f"mlp.{name}_proj") for name in names])

    mlp = experts if shape.experts else dense
    norms = [("q_norm", shape.heads), ("k_norm", shape.kv_heads)] if shape.query_key_norms else []
    repeated = [get(f"self_attn.{name}").expand(heads, -1) for name, heads in norms]
    return LayerWeights(
        input_norm=get("input_layernorm"),
        qkv=torch.cat([get(f"self_attn.{name}_proj") for name in ("q", "k", "v")]),
        qk_norm=torch.cat(repeated).contiguous() if repeated else None,
        output=get("self_attn.o_proj"),
        post_norm=get("post_attention_layernorm"),
        router=get("mlp.gate") if shape.experts else None,
        gate_up=mlp("gate", "up"),
        down=mlp("down"),
    )
