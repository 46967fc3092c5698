"""Import a Hugging Face Qwen3-MoE directory (bfloat16 or float32) as a base policy: a checkpoint and a trainer state.

Masters are the weights as float32; the checkpoint has their FP8 blocks. All layers must have the same structure: no
dense layers, no attention bias.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.chat import ChatTokenizer
from contracts.checkpoints import BLOCK, WEIGHTS, quantization_config, ragged_sides
from contracts.digests import action_key, sha256
from contracts.errors import SchemaError
from contracts.qwen3_moe import expert_names, parameter_shapes
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from trainer.config import IMPORT_VERSION
from trainer.errors import TrainingDataError
from trainer.export import TOKENIZER_FILES, publish_checkpoint
from trainer.parameters import Parameters
from trainer.state import capture_state, publish_state
from trainer.tensors import read_tensor, tensor_digest

_REQUIRED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
# transformers omits these from config.json if they equal the class's defaults.
_DEFAULTS = {"norm_topk_prob": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "initializer_range": 0.02}
_COPIED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)


def import_checkpoint(directory: Path, store: Store, key: str | None = None) -> Artifact:
    """Publish `directory` as `checkpoint` (returned) and `trainer_state` of one key. key: action key; default: derived
    from the content.

    Raises TrainingDataError, which names the unsupported file, field or tensor.
    """
    config = import_config(directory)
    masters = _read_masters(directory, config)
    tokenizer = _publish_tokenizer(directory, store)
    content = {"weights": tensor_digest(masters), "tokenizer": tokenizer.ref.digest}
    key = key or action_key("import", content, config, IMPORT_VERSION)
    checkpoint, saved = find_artifact(store, "checkpoint", key), find_artifact(store, "trainer_state", key)
    if checkpoint is not None and saved is not None:
        return checkpoint
    parameters = Parameters.from_masters(config, masters)
    slice_, parents = {"content": content}, {"tokenizer": tokenizer.ref}
    state = capture_state(parameters, {}, "none", 0, {})
    publish_state(store, "trainer_state", key, state, parents=parents, config=slice_, code_version=IMPORT_VERSION)
    return publish_checkpoint(
        store,
        key,
        parameters,
        tokenizer,
        parents=parents,
        config=slice_,
        code_version=IMPORT_VERSION,
        meta={"step": 0, "imported": directory.name},
        metrics=b"",
    )


def import_config(directory: Path) -> dict[str, Any]:
    """config.json for the checkpoint made from `directory`.

    Raises TrainingDataError for an unsupported model.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise TrainingDataError(f"{directory} has no config.json: pass a Hugging Face model directory")
    found = _read_json(path)
    if found.get("model_type") != "qwen3_moe":
        raise TrainingDataError(
            f"{path}: model_type {found.get('model_type')!r} is not supported: only qwen3_moe can be trained"
        )
    for name, value in _REQUIRED.items():
        if found.get(name, value) not in (value, None):
            raise TrainingDataError(f"{path}: {name} = {found[name]!r} is not supported, only {value!r}")
    if "quantization_config" in found:
        raise TrainingDataError(f"{path} is quantized already: pass the bfloat16 or float32 original")
    config = {name: _field(found, name, path) for name in _COPIED}
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "float32",
        "use_cache": True,
        "num_experts": found.get("num_experts") or _field(found, "num_local_experts", path),
        "rope_theta": _rope_theta(found, path),
        "intermediate_size": found.get("intermediate_size", config["moe_intermediate_size"]),
        **{name: found.get(name, value) for name, value in _DEFAULTS.items()},
        "sliding_window": None,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.0,
        **_REQUIRED,
    }
    for name, size in ragged_sides(config).items():
        raise TrainingDataError(
            f"{path}: {name} = {size} is not a multiple of {BLOCK}: other loaders would misread or refuse its FP8"
            " checkpoint; pass a model whose projections are multiples of it"
        )
    if found.get("eos_token_id") is not None:
        config["eos_token_id"] = found["eos_token_id"]
    return {**config, "quantization_config": quantization_config(config)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingDataError(f"{path} is not JSON ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise TrainingDataError(f"{path} is not a JSON object: fetch it again")
    return found


def _field(found: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in found:
        raise TrainingDataError(f"{path} lacks {name}: is it a complete Qwen3-MoE config?")
    return found[name]


def _rope_theta(found: Mapping[str, Any], path: Path) -> float:
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise TrainingDataError(f"{path}: rotary scaling {kind!r} is not supported, only the default")
    return float(found.get("rope_theta") or rope.get("rope_theta") or 10_000.0)


def _read_masters(directory: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """float32 tensors by the trainer's names, from one file or from parts."""
    try:
        files = TensorFiles(directory, WEIGHTS)
        return {name: _read_master(files, directory, name, shape) for name, shape in parameter_shapes(config).items()}
    except SchemaError as error:
        raise TrainingDataError(str(error)) from None


def _read_master(files: TensorFiles, directory: Path, name: str, shape: tuple[int, ...]) -> Tensor:
    master = torch.empty(shape)
    singles = expert_names(name, shape)
    for target, single in zip(master if len(shape) == 3 else [master], singles, strict=True):
        found = read_tensor(files, single)
        if found.shape != target.shape:
            raise TrainingDataError(
                f"{directory}: tensor {single} is {tuple(found.shape)}, config.json says {tuple(target.shape)}: fetch"
                " both again"
            )
        target.copy_(found)
    return master


def _publish_tokenizer(directory: Path, store: Store) -> Artifact:
    """Commit the directory's tokenizer as a `tokenizer` artifact. Raises an error if it lacks the chat markup."""
    ChatTokenizer.from_directory(directory)
    files = {name: directory / name for name in TOKENIZER_FILES if (directory / name).is_file()}
    data = {name: path.read_bytes() for name, path in files.items()}
    if "chat_template.jinja" not in data and "tokenizer_config.json" in data:
        template = json.loads(data["tokenizer_config.json"]).get("chat_template")
        data |= {"chat_template.jinja": template.encode()} if isinstance(template, str) else {}
    missing = [name for name in TOKENIZER_FILES if name not in data]
    if missing:
        raise TrainingDataError(f"{directory} lacks {', '.join(missing)}: save the tokenizer beside the model")
    key = action_key("import_tokenizer", {name: sha256(data[name]) for name in sorted(data)}, {}, IMPORT_VERSION)
    found = find_artifact(store, "tokenizer", key)
    if found is not None:
        return found
    with ArtifactWriter(store, "tokenizer", key, parents={}, config={}, code_version=IMPORT_VERSION) as out:
        for name, content in data.items():
            out.add_bytes(name, content)
        return out.commit()
