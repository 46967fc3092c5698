"""config.json of a Hugging Face model directory, checked and turned into that of the checkpoint made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contracts.architectures import CLASSES, FIXED, Architecture, unsupported_feature
from contracts.checkpoints import BLOCK, quantization_config, ragged_sides
from contracts.errors import SchemaError
from trainer.errors import TrainingDataError


def import_config(directory: Path) -> dict[str, Any]:
    """config.json for the checkpoint made from `directory`.

    Raises TrainingDataError for an unsupported model.
    """
    path = directory / "config.json"
    found = read_original_config(directory)
    if found.get("model_type") not in CLASSES:
        raise TrainingDataError(
            f"{path}: model_type {found.get('model_type')!r} is not supported: only {', '.join(CLASSES)} can be trained"
        )
    feature = unsupported_feature(found)
    if feature is not None:
        raise TrainingDataError(f"{path}: {feature} is not supported: pass a model without it")
    _require_blocks(found, path)
    try:
        config = _checkpoint_config(found)
    except SchemaError as error:
        raise TrainingDataError(f"{directory}/{error}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise TrainingDataError(f"{path} does not describe a model ({error!r}): fetch it again") from None
    for name, size in ragged_sides(config).items():
        raise TrainingDataError(
            f"{path}: {name} = {size} is not a multiple of {BLOCK}: other loaders would misread or refuse its FP8"
            " checkpoint; pass a model whose projections are multiples of it"
        )
    if found.get("eos_token_id") is not None:
        config["eos_token_id"] = found["eos_token_id"]
    return {**config, "quantization_config": quantization_config(config)}


def read_original_config(directory: Path) -> dict[str, Any]:
    """The directory's own config.json. Raises TrainingDataError."""
    path = directory / "config.json"
    if not path.is_file():
        raise TrainingDataError(f"{directory} has no config.json: pass a Hugging Face model directory")
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TrainingDataError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise TrainingDataError(f"{path} is not a JSON object: fetch it again")
    return found


def _checkpoint_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that the checkpoint keeps. transformers omits some that equal the class's defaults."""
    own = dict(found)
    if own.get("num_key_value_heads") is None and "num_attention_heads" in own:
        own["num_key_value_heads"] = own["num_attention_heads"]
    shape = Architecture.from_config(own)
    config: dict[str, Any] = {
        "architectures": [CLASSES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.epsilon,
        "tie_word_embeddings": shape.tied,
        "initializer_range": own.get("initializer_range", 0.02),
        "intermediate_size": own.get("intermediate_size", shape.width),
        **FIXED[shape.family],
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.width,
            "norm_topk_prob": shape.normalize_top_k,
        }
    if shape.rope_scaling is not None:
        scaling = asdict(shape.rope_scaling)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_factor"],
            "high_freq_factor": scaling["high_factor"],
            "original_max_position_embeddings": scaling["original_positions"],
        }
    return config


def _require_blocks(found: Mapping[str, Any], path: Path) -> None:
    """Require that a quantized original has the FP8 blocks that checkpoints have."""
    quantization = found.get("quantization_config")
    if quantization is None:
        return
    wanted = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    for name, value in wanted.items():
        if quantization.get(name, value if name == "activation_scheme" else None) != value:
            raise TrainingDataError(
                f"{path}: quantization_config.{name} = {quantization.get(name)!r} is not supported, only {value!r}:"
                " pass an original in bfloat16, float32 or FP8 blocks"
            )
