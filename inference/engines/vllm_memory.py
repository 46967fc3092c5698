"""Forecast of the memory of a vLLM server on each of its GPUs.

Weights of FP8 checkpoints: one byte for each projection's weight, float32 scales, and the engine's dtype (bfloat16) for
embeddings, output head, routers and norms, divided among the GPUs. The rest of `--gpu-memory-utilization` holds keys
and values. Activations and CUDA graphs are not counted: vLLM measures them when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.architectures import Architecture, parameter_shapes
from contracts.checkpoints import BLOCK, is_quantized
from contracts.errors import SchemaError
from inference.engines.config import VllmConfig

UTILIZATION = 0.9
"""vLLM's default of --gpu-memory-utilization."""
NARROW, SCALE = 2, 4
"""Bytes of a bfloat16 number, and of a scale."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of the server."""

    gpus: int
    weights: int
    """Bytes of weights on one GPU."""
    token: int
    """Bytes of keys and values of one token, on one GPU."""
    context: int
    """Longest sequence, in tokens."""
    sequences: int
    """Episodes in flight."""
    utilization: float
    """Share of a GPU that vLLM uses."""
    problems: tuple[str, ...]
    """Settings that vLLM refuses."""

    @property
    def cache(self) -> int:
        """Bytes of keys and values on one GPU if all episodes in flight were as long as the context."""
        return self.token * self.context * self.sequences

    def room(self, gpu: int) -> int:
        """Tokens that fit into the cache of a GPU with `gpu` bytes."""
        return max(0, int((gpu * self.utilization - self.weights) // self.token))


def engine_memory(config: VllmConfig, model: Mapping[str, Any], context: int, sequences: int) -> EngineMemory:
    """Forecast for a server of `config` with a checkpoint of config.json `model`."""
    shape, parts = Architecture.from_config(model), config.tensor_parallel
    length = flag(config.flags, "--max-model-len")
    narrow = 1 if (flag(config.flags, "--kv-cache-dtype") or "").startswith("fp8") else NARROW
    return EngineMemory(
        gpus=parts,
        weights=weight_bytes(model) // parts,
        token=token_bytes(model, parts, narrow),
        context=int(length) if length else context,
        sequences=sequences,
        utilization=float(flag(config.flags, "--gpu-memory-utilization") or UTILIZATION),
        problems=tuple(refusals(config, shape)),
    )


def refusals(config: VllmConfig, shape: Architecture) -> list[str]:
    """Settings with which vLLM can't load the FP8 checkpoint of this shape."""
    if keeps_blocks(shape.expert_width, config.tensor_parallel) or "--enable-expert-parallel" in config.flags:
        return []
    fitting = [
        count
        for count in range(1, config.tensor_parallel)
        if config.tensor_parallel % count == 0 and keeps_blocks(shape.expert_width, count)
    ]
    smaller = f", or lower it to {max(fitting)}" if fitting else ""
    return [
        f"engine.tensor_parallel={config.tensor_parallel} cuts experts of width {shape.expert_width} into"
        f" {shape.expert_width / config.tensor_parallel:g} columns, no multiple of the FP8 block of {BLOCK}: add"
        f" --enable-expert-parallel to engine.flags{smaller}"
    ]


def keeps_blocks(expert_width: int, parts: int) -> bool:
    """Whether experts of this width, 0 in a dense model, can be cut into `parts` of whole FP8 blocks."""
    return expert_width % (parts * BLOCK) == 0


def flag(flags: Sequence[str], name: str) -> str | None:
    """Value of a command-line flag, given as `name value` or `name=value`; the last one counts."""
    found = None
    for index, each in enumerate(flags):
        if each == name and index + 1 < len(flags):
            found = flags[index + 1]
        elif each.startswith(f"{name}="):
            found = each.partition("=")[2]
    return found


def token_bytes(model: Mapping[str, Any], parts: int, narrow: int) -> int:
    """Bytes of keys and values of one token on each of `parts` GPUs. narrow: bytes of a number.

    Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) keeps one latent vector and one rotary key, whole on
    each GPU. Raises SchemaError.
    """
    try:
        if model.get("kv_lora_rank"):
            return int(model["num_hidden_layers"] * (model["kv_lora_rank"] + model["qk_rope_head_dim"]) * narrow)
        heads = model.get("num_key_value_heads") or model["num_attention_heads"]
        head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        # a key head is copied to several GPUs where there are fewer heads than GPUs
        return int(2 * model["num_hidden_layers"] * math.ceil(heads / parts) * head_dim * narrow)
    except KeyError as error:
        raise SchemaError(f"config.json lacks {error}, which the size of keys and values depends on") from None


def weight_bytes(model: Mapping[str, Any]) -> int:
    """Bytes of the weights of an FP8 checkpoint of this shape."""
    total = 0
    for name, dims in parameter_shapes(model).items():
        count = math.prod(dims)
        total += count + SCALE * count // BLOCK**2 if is_quantized(name) else NARROW * count
    return total
