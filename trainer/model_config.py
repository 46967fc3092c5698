"""Shape of a fresh model, as an experiment describes it. Importing this needs no torch."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from contracts.architectures import CLASSES, FIXED, Family
from contracts.checkpoints import BLOCK, quantization_config, ragged_sides
from trainer.settings import Settings

_OF_EXPERTS = {"experts", "expert_width", "experts_per_token"}
"""Fields of `ModelConfig` that only a mixture of experts has."""


class Llama3RopeConfig(Settings):
    """Llama 3.1's scaling of the rotary frequencies for long contexts; the defaults are those of Llama 3.1."""

    factor: float = Field(default=8.0, ge=1)
    """Divisor of the lowest frequencies."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Frequencies of a wavelength above original_max_position_embeddings / low_freq_factor are divided."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Frequencies of a wavelength below original_max_position_embeddings / high_freq_factor stay."""
    original_max_position_embeddings: int = Field(default=8192, ge=1)
    """Context length before the extension, in tokens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}: raise it"
            )
        return self


class ModelConfig(Settings):
    """Shape of a decoder."""

    family: Family = "qwen3_moe"
    """Architecture: Qwen3-MoE, or the dense Qwen3 or Llama."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream. A multiple of 128, the FP8 block, as are expert_width, mlp_width,
    heads * head_dim and kv_heads * head_dim.
    """
    layers: int = Field(default=3, ge=1)
    """Decoder layers."""
    experts: int = Field(default=8, ge=1)
    """Experts per layer. Only qwen3_moe has experts."""
    expert_width: int = Field(default=128, ge=8)
    """Inner width of one expert."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that the router selects per token."""
    mlp_width: int | None = Field(default=None, ge=8)
    """Inner width of the MLP of a dense family; null: 4 * hidden_size."""
    heads: int = Field(default=4, ge=1)
    """Query heads."""
    kv_heads: int = Field(default=4, ge=1)
    """Key and value heads; divides `heads`."""
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of one head."""
    max_positions: int = Field(default=512, ge=8)
    """Longest context, in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position frequencies."""
    rope_llama3: Llama3RopeConfig | None = None
    """Scaling of the rotary frequencies as in Llama 3.1; null: none."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon added to the mean square before the root."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding matrix."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of freshly drawn weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._require_own_fields()
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}: lower it")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}: choose a divisor")
        if self.family == "llama" and self.hidden_size % self.heads:
            raise ValueError(
                f"heads {self.heads} does not divide hidden_size {self.hidden_size}, as transformers requires of llama:"
                " choose a divisor"
            )
        names = {
            "hidden_size": "hidden_size",
            "intermediate_size": "mlp_width",
            "moe_intermediate_size": "expert_width",
            "num_attention_heads * head_dim": "heads * head_dim",
            "num_key_value_heads * head_dim": "kv_heads * head_dim",
        }
        for name, size in ragged_sides(self._sizes()).items():
            raise ValueError(
                f"{names[name]} = {size} is not a multiple of {BLOCK}, the FP8 block that other loaders of the"
                f" checkpoint expect: make it {-(-size // BLOCK) * BLOCK}"
            )
        return self

    def _require_own_fields(self) -> None:
        foreign = _OF_EXPERTS & self.model_fields_set if self.family != "qwen3_moe" else set()
        for name in sorted(foreign):
            raise ValueError(
                f"{name} is set, but family {self.family} has no experts: use mlp_width, or family qwen3_moe"
            )
        if self.mlp_width is not None and self.family == "qwen3_moe":
            raise ValueError("mlp_width is set, but family qwen3_moe has experts: use expert_width, or family qwen3")

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields of the family. Those that earlier versions lacked are left out while they have their default,
        so that action keys stay.
        """
        values: dict[str, Any] = dump(self)
        defaults = {"family": "qwen3_moe", "mlp_width": None, "rope_llama3": None}
        unset = {name for name, default in defaults.items() if getattr(self, name) == default}
        unset |= _OF_EXPERTS if self.family != "qwen3_moe" else set()
        return {name: value for name, value in values.items() if name not in unset}

    def _sizes(self) -> dict[str, Any]:
        return {
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **self._mlp(),
        }

    def _mlp(self) -> dict[str, Any]:
        if self.family != "qwen3_moe":
            return {"intermediate_size": self.mlp_width or 4 * self.hidden_size}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_width,
            "intermediate_size": self.expert_width,
        }

    def hf_config(self, vocab_size: int, end_of_turn: int | None = None) -> dict[str, Any]:
        """The `config.json` of a checkpoint of this shape, FP8 blocks declared."""
        config: dict[str, Any] = {
            "architectures": [CLASSES[self.family]],
            "vocab_size": vocab_size,
            **self._sizes(),
            "num_hidden_layers": self.layers,
            **FIXED[self.family],
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
        }
        if self.family == "qwen3_moe":
            config["norm_topk_prob"] = True
        if self.rope_llama3 is not None:
            config["rope_scaling"] = {"rope_type": "llama3", **self.rope_llama3.model_dump()}
        if end_of_turn is not None:
            config["eos_token_id"] = end_of_turn
        config["quantization_config"] = quantization_config(config)
        return config
