"""Write and read checkpoints in the Hugging Face layout, with the codes and scales of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.checkpoints import WEIGHTS, check_checkpoint, is_quantized
from contracts.failpoints import failpoint
from contracts.qwen3_moe import expert_names, parameter_shapes
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from trainer.errors import TrainingDataError
from trainer.parameters import Buffer, Parameters
from trainer.tensors import read_tensor, save_tensors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
RECIPE = "w8"


def checkpoint_tensors(parameters: Parameters) -> dict[str, Tensor]:
    """Tensors of the exported layout by name, one per expert. They share the memory of `parameters`."""
    tensors: dict[str, Tensor] = {}
    for buffer in parameters.buffers:
        for name in buffer.spans:
            if buffer.codes is None or buffer.scales is None:
                tensors[name] = buffer.view(buffer.master, name)
                continue
            for single, codes, scales in _matrices(buffer, name):
                tensors[single] = codes
                tensors[f"{single}_scale_inv"] = scales
    return tensors


def load_checkpoint(directory: Path) -> Parameters:
    """Parameters of an exported checkpoint, with its codes and scales; masters are the dequantized weights."""
    config = check_checkpoint(directory)
    files = TensorFiles(directory, WEIGHTS)
    masters, codes, scales = {}, {}, {}
    for name, shape in parameter_shapes(config).items():
        if not is_quantized(name):
            masters[name] = read_tensor(files, name)
            continue
        singles = expert_names(name, shape)
        codes[name] = torch.stack([read_tensor(files, single) for single in singles])
        scales[name] = torch.stack([read_tensor(files, f"{single}_scale_inv") for single in singles])
        masters[name] = torch.zeros(shape)
    parameters = Parameters.from_masters(config, masters)
    parameters.set_codes(codes, scales)
    return parameters


def publish_checkpoint(
    store: Store,
    key: str,
    parameters: Parameters,
    tokenizer: Artifact,
    *,
    parents: Mapping[str, ArtifactRef],
    config: Mapping[str, Any],
    code_version: str,
    meta: Mapping[str, Any],
    metrics: bytes,
) -> Artifact:
    """Commit a `checkpoint` artifact. tokenizer: artifact with the tokenizer's files. metrics: JSONL, outside the
    digest.
    """
    with ArtifactWriter(store, "checkpoint", key, parents=parents, config=config, code_version=code_version) as out:
        save_tensors(out, WEIGHTS, checkpoint_tensors(parameters), {"format": "pt"})
        failpoint("checkpoint-staged")
        out.add_json("config.json", parameters.config)
        out.add_json("generation_config.json", _generation_config(parameters.config))
        for name in TOKENIZER_FILES:
            if name not in tokenizer.names():
                raise TrainingDataError(f"{tokenizer.ref.uri} has no {name}: build the tokenizer again")
            out.add_bytes(name, tokenizer.path(name).read_bytes())
        (out.directory / "metrics.jsonl").write_bytes(metrics)
        out.add_file("metrics.jsonl", telemetry=True)
        check_checkpoint(out.directory)
        return out.commit(meta={"forward_recipe": RECIPE, "policy_version": None, **meta})


def _matrices(buffer: Buffer, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    assert buffer.codes is not None and buffer.scales is not None
    start, end, shape = buffer.spans[name]
    for offset, single in zip(range(start, end), expert_names(name, shape), strict=True):
        yield single, buffer.codes[offset], buffer.scales[offset]


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    stop = {"eos_token_id": config["eos_token_id"]} if config.get("eos_token_id") is not None else {}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **stop}
