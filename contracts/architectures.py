"""Architectures that Triplane trains and serves: the numbers in a config.json, and the resulting shape of every weight.

    model_type   attention                     MLP
    qwen3_moe    norms of queries and keys     top-k of `num_experts` routed SwiGLU experts
    qwen3        norms of queries and keys     dense SwiGLU of width `intermediate_size`
    llama        no such norms                 dense SwiGLU of width `intermediate_size`

Rotary positions are unscaled or scaled as `rope_type: llama3` says.

Trainer, exported checkpoints and the built-in engine read only this. Reference: transformers' Qwen3MoeForCausalLM,
Qwen3ForCausalLM and LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from contracts.errors import SchemaError

if TYPE_CHECKING:
    from torch import Tensor

Family = Literal["qwen3_moe", "qwen3", "llama"]
"""`model_type` in config.json."""
CLASSES: Mapping[str, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
"""Family -> class of transformers and vLLM, for `architectures` in config.json."""

_PLAIN = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
_NO_WINDOWS = {"use_sliding_window": False, "sliding_window": None}
_WRITTEN = {"use_cache": True, "torch_dtype": "float32"}
FIXED: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_PLAIN,
        **_NO_WINDOWS,
        "router_aux_loss_coef": 0.0,
        **_WRITTEN,
    },
    "qwen3": {**_PLAIN, **_NO_WINDOWS, **_WRITTEN},
    "llama": {**_PLAIN, "mlp_bias": False, **_WRITTEN},
}
"""Family -> entries of config.json that are the same in every checkpoint that Triplane writes."""


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of the rotary frequencies (`rope_type: llama3`)."""

    factor: float
    """Divisor of the frequencies whose wavelength exceeds original_positions / low_factor."""
    low_factor: float
    high_factor: float
    """Frequencies whose wavelength is below original_positions / high_factor stay."""
    original_positions: int
    """Context length before the extension, in tokens."""


@dataclass(frozen=True)
class Architecture:
    """Numbers of config.json that define the forward pass."""

    family: Family
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Inner width of the MLP, or of one expert."""
    experts: int
    """Experts of a layer; 0 in a dense model."""
    experts_per_token: int
    """0 in a dense model."""
    normalize_top_k: bool
    tied: bool
    epsilon: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    max_positions: int

    @property
    def expert_width(self) -> int:
        """Inner width of one expert; 0 in a dense model."""
        return self.width if self.experts else 0

    @property
    def query_key_norms(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.family != "llama"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Architecture from a config.json. Raises SchemaError with the first missing key."""
        family = family_of(config)
        mixture = family == "qwen3_moe"
        try:
            return cls(
                family=family,
                vocabulary=config["vocab_size"],
                hidden=config["hidden_size"],
                layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=_head_dim(config, family),
                width=config["moe_intermediate_size" if mixture else "intermediate_size"],
                # transformers 5 writes num_local_experts
                experts=(config.get("num_local_experts") or config["num_experts"]) if mixture else 0,
                experts_per_token=config["num_experts_per_tok"] if mixture else 0,
                normalize_top_k=config.get("norm_topk_prob", False),
                tied=config.get("tie_word_embeddings", False),
                epsilon=config.get("rms_norm_eps", 1e-6),
                rope_theta=float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0),
                rope_scaling=_rope_scaling(config),
                max_positions=config["max_position_embeddings"],
            )
        except KeyError as error:
            raise SchemaError(f"config.json lacks {error}: is it a complete {family} checkpoint?") from None


def family_of(config: Mapping[str, Any]) -> Family:
    """Family of a config.json; without `model_type`, qwen3_moe. Raises SchemaError for any other."""
    found = config.get("model_type", "qwen3_moe")
    if found not in CLASSES:
        raise SchemaError(f"config.json: model_type {found!r} is not supported: use one of {', '.join(CLASSES)}")
    family: Family = found
    return family


def unsupported_feature(config: Mapping[str, Any]) -> str | None:
    """First entry of a config.json that changes the forward pass to one that trainer and built-in engine lack, or
    None.
    """
    kind = _rope_type(config)
    partial = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    found = {
        f"hidden_act = {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "attention_bias = True": config.get("attention_bias"),
        "mlp_bias = True": config.get("mlp_bias"),
        "sliding windows (use_sliding_window = True)": config.get("use_sliding_window"),
        "dense layers (mlp_only_layers, decoder_sparse_step)": (
            config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        ),
        f"rotary scaling {kind!r}": kind not in ("default", "llama3"),
        f"partial_rotary_factor = {partial}": partial != 1.0,
    }
    return next((feature for feature, present in found.items() if present), None)


def inverse_frequencies(shape: Architecture) -> Tensor:
    """Rotary frequencies in radians a position, float32 [head_dim / 2] (arXiv:2104.09864), with `rope_scaling`.

    Source of the scaling: transformers' `_compute_llama3_parameters`.
    """
    import torch  # not needed by processes that read only shapes

    half = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope_theta**half)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * torch.pi / frequencies
    longest = scaling.original_positions / scaling.low_factor
    shortest = scaling.original_positions / scaling.high_factor
    slow = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    share = (scaling.original_positions / wavelengths - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    smooth = (1 - share) * slow / scaling.factor + share * slow
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, smooth, slow)


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a model with this config.json; a layer's experts are stacked under
    `mlp.experts.*`. Raises SchemaError.
    """
    found = Architecture.from_config({"max_position_embeddings": 0, **config})
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (found.vocabulary, found.hidden)}
    layer = {
        "input_layernorm": (found.hidden,),
        **_attention_shapes(found),
        "post_attention_layernorm": (found.hidden,),
        **_mlp_shapes(found),
    }
    for index in range(found.layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (found.hidden,)
    if not found.tied:
        shapes["lm_head.weight"] = (found.vocabulary, found.hidden)
    return shapes


def expert_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Exported names of a parameter's matrices: one, or one per expert."""
    if len(shape) < 3:
        return [name]
    return [name.replace(".experts.", f".experts.{index}.") for index in range(shape[0])]


def _attention_shapes(found: Architecture) -> dict[str, tuple[int, ...]]:
    query, keys = found.heads * found.head_dim, found.kv_heads * found.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, found.hidden),
        "self_attn.k_proj": (keys, found.hidden),
        "self_attn.v_proj": (keys, found.hidden),
        "self_attn.o_proj": (found.hidden, query),
    }
    if found.query_key_norms:
        shapes |= {"self_attn.q_norm": (found.head_dim,), "self_attn.k_norm": (found.head_dim,)}
    return shapes


def _mlp_shapes(found: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, width, experts = found.hidden, found.width, found.experts
    if not experts:
        return {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
    return {
        "mlp.gate": (experts, hidden),
        "mlp.experts.gate_proj": (experts, width, hidden),
        "mlp.experts.up_proj": (experts, width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }


def _head_dim(config: Mapping[str, Any], family: Family) -> int:
    """The head width, which config.json may leave to the class's default."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    return 128 if family == "qwen3" else int(config["hidden_size"]) // int(config["num_attention_heads"])


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(config: Mapping[str, Any]) -> Llama3Scaling | None:
    if _rope_type(config) != "llama3":
        return None
    rope = _rope(config)
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_factor=float(rope["low_freq_factor"]),
        high_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )
