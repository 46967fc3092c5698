"""Architecture of Qwen3-MoE: the numbers in its config.json, and the resulting shape of every weight.

Shared by trainer, exported checkpoints and the built-in engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import SchemaError


@dataclass(frozen=True)
class Architecture:
    """Numbers of config.json that define the forward pass."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_width: int
    normalize_top_k: bool
    tied: bool
    epsilon: float
    rope_theta: float
    max_positions: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Architecture from a config.json. Raises SchemaError with the first missing key."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        try:
            return cls(
                vocabulary=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                experts=config["num_experts"],
                experts_per_token=config["num_experts_per_tok"],
                expert_width=config["moe_intermediate_size"],
                normalize_top_k=config.get("norm_topk_prob", False),
                tied=config.get("tie_word_embeddings", False),
                epsilon=config["rms_norm_eps"],
                rope_theta=float(rope.get("rope_theta") or config["rope_theta"]),
                max_positions=config["max_position_embeddings"],
            )
        except KeyError as error:
            raise SchemaError(f"config.json lacks {error}: is it a Qwen3-MoE checkpoint?") from None


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a model with this config.json; a layer's experts are stacked under
    `mlp.experts.*`.
    """
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    head = config["head_dim"]
    query, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate": (experts, hidden),
            "mlp.experts.gate_proj": (experts, width, hidden),
            "mlp.experts.up_proj": (experts, width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def expert_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Exported names of a parameter's matrices: one, or one per expert."""
    if len(shape) < 3:
        return [name]
    return [name.replace(".experts.", f".experts.{index}.") for index in range(shape[0])]
