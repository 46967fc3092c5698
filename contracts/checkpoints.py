"""Layout of policy checkpoints: that of Hugging Face, with FP8 block-quantized linear weights.

    config.json  model.safetensors  tokenizer.json  tokenizer_config.json  chat_template.jinja  generation_config.json

More than 4 GB of weights are parts with an index in the place of `model.safetensors`: see `contracts.tensor_files`.

Every `*_proj.weight` is float8_e4m3fn [N, K] beside `*_proj.weight_scale_inv` float32 [ceil(N/128), ceil(K/128)], a
multiplier: weight = code * scale. Embeddings, lm_head, norms and routers are float32. Layout: that of DeepSeek-V3 and
Qwen3-FP8, which vLLM loads as is. Other recipes of `contracts.precision` store every weight, or the weights that are
no codes, in their own dtype. `contracts.architectures` says which tensors a model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contracts.architectures import Architecture, expert_names, parameter_shapes
from contracts.errors import SchemaError
from contracts.precision import exported_forward
from contracts.tensor_files import Form, TensorFiles

BLOCK = 128
WEIGHTS = "model.safetensors"

UNQUANTIZED = ("lm_head", "model.embed_tokens", "model.norm")


def quantization_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` entry of config.json for a model config."""
    shapes = parameter_shapes(config)
    kept = [*UNQUANTIZED, *(name.removesuffix(".weight") for name in shapes if name.endswith(".mlp.gate.weight"))]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": kept,
        "modules_to_not_convert": kept,
    }


def ragged_sides(config: Mapping[str, Any]) -> dict[str, int]:
    """Sides of quantized matrices that are no multiple of BLOCK, by key or formula of `config.json`, e.g.
    {"hidden_size": 96}.

    Loaders disagree about a partial last block: transformers uses rows // (rows of scales) as the block's height, so
    that 192 rows become two blocks of 96; vLLM and SGLang refuse such experts and such parts of a fused projection.
    """
    found = Architecture.from_config({"vocab_size": 0, "num_hidden_layers": 0, "max_position_embeddings": 0, **config})
    sides = {
        "hidden_size": found.hidden,
        "moe_intermediate_size" if found.experts else "intermediate_size": found.width,
        "num_attention_heads * head_dim": found.heads * found.head_dim,
        "num_key_value_heads * head_dim": found.kv_heads * found.head_dim,
    }
    return {name: size for name, size in sides.items() if size % BLOCK}


def is_quantized(name: str) -> bool:
    """Whether the weight called `name` is stored as FP8 codes with a scale beside it."""
    return name.endswith("_proj.weight")


def expected_tensors(config: dict[str, Any]) -> dict[str, Form]:
    """Dtype and shape of exactly the tensors of a checkpoint with this config.json.

    Raises SchemaError for a recipe that this version does not know.
    """
    forward = exported_forward(config)
    plain = "BF16" if forward.activations == "bfloat16" else "F32"
    found: dict[str, Form] = {}
    for name, shape in parameter_shapes(config).items():
        for single in expert_names(name, shape):
            coded = forward.quantized and is_quantized(name)
            found[single] = ("F8_E4M3" if coded else plain, shape[-2:])
            if coded:
                found[f"{single}_scale_inv"] = ("F32", tuple(-(-size // BLOCK) for size in shape[-2:]))
    return found


def check_checkpoint(directory: Path) -> dict[str, Any]:
    """Check a checkpoint directory that the trainer exported, tensor by tensor, and return its config.

    Raises SchemaError naming the first fault.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise SchemaError(f"{directory} has no config.json: is it a checkpoint directory?")
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        expected = expected_tensors(config)
    except ValueError as error:
        raise SchemaError(f"{path} is not JSON ({error}): export the checkpoint again") from None
    except (AttributeError, TypeError) as error:
        raise SchemaError(f"{path} does not describe a model ({error!r}): export the checkpoint again") from None
    except SchemaError as error:
        raise SchemaError(f"{directory}/{error}") from None
    found = TensorFiles(directory, WEIGHTS).forms
    for name, form in expected.items():
        if name not in found:
            raise SchemaError(f"checkpoint {directory} lacks tensor {name}: export it again from its trainer_state")
        if found[name] != form:
            raise SchemaError(
                f"checkpoint {directory}: tensor {name} is {found[name]}, expected {form}: export it again from its"
                " trainer_state"
            )
    surplus = sorted(set(found) - set(expected))
    if surplus:
        raise SchemaError(f"checkpoint {directory} holds tensors its config does not name: {', '.join(surplus[:3])}")
    return config
