"""Import a Hugging Face directory (bfloat16, float32 or FP8 blocks) as a base policy: a checkpoint and a trainer state.

Masters are the weights as float32; the checkpoint has their FP8 blocks, or what another recipe stores. An FP8 original
keeps its codes and scales bit for bit; its masters are the dequantized weights. All layers must have the same
structure: no dense layers in a mixture of experts, no attention bias.
"""

from __future__ import annotations

import json
from pathlib import Path

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import action_key, sha256
from contracts.store import Store
from trainer.config import IMPORT_VERSION
from trainer.errors import TrainingDataError
from trainer.export import TOKENIZER_FILES, publish_checkpoint
from trainer.import_config import import_config, read_original_config
from trainer.import_tensors import read_original
from trainer.parameters import Parameters
from trainer.precision import DEFAULT, Precision, with_precision
from trainer.state import capture_state, publish_state
from trainer.tensors import tensor_digest


def import_checkpoint(
    directory: Path, store: Store, key: str | None = None, precision: Precision = DEFAULT
) -> Artifact:
    """Publish `directory` as `checkpoint` (returned) and `trainer_state` of one key. key: action key; default: derived
    from the content. precision: recipe of the checkpoint.

    Raises TrainingDataError, which names the unsupported file, field or tensor.
    """
    config = with_precision(import_config(directory), precision)
    original = read_original(directory, config, fp8="quantization_config" in read_original_config(directory))
    tokenizer = publish_tokenizer(directory, store, config["vocab_size"])
    content = {"weights": tensor_digest(original.masters), "tokenizer": tokenizer.ref.digest}
    key = key or action_key("import", content, config, IMPORT_VERSION)
    checkpoint, saved = find_artifact(store, "checkpoint", key), find_artifact(store, "trainer_state", key)
    if checkpoint is not None and saved is not None:
        return checkpoint
    parameters = Parameters.from_masters(config, original.masters)
    if original.codes and not precision.forward.power_of_two:
        parameters.set_codes(original.codes, original.scales)
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


def publish_tokenizer(directory: Path, store: Store, vocabulary: int | None = None) -> Artifact:
    """Commit the directory's tokenizer as a `tokenizer` artifact. vocabulary: rows of the model's embedding.

    Raises an error if it lacks the chat markup or has ids that the model lacks.
    """
    tokens = ChatTokenizer.from_directory(directory).vocabulary_size
    if vocabulary is not None and tokens > vocabulary:
        raise TrainingDataError(
            f"{directory}: tokenizer.json has {tokens} tokens, but config.json's vocab_size is {vocabulary}: it is"
            " another model's tokenizer; fetch both again"
        )
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
