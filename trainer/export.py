"""Write and read checkpoints in the Hugging Face layout, with the codes and scales of the forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FOLDER, Adapter, read_adapter
from contracts.architectures import expert_names, parameter_shapes
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.checkpoints import WEIGHTS, check_checkpoint, is_quantized
from contracts.failpoints import failpoint
from contracts.precision import exported_forward
from contracts.store import Store
from contracts.tensor_files import TensorFiles
from contracts.tensor_parts import add_tensors, bytes_of
from trainer.adapters import AdaptedBase, AdaptedParameters, adapter_tensors
from trainer.errors import TrainingDataError
from trainer.parameters import Buffer, Parameters, dequantize_stack
from trainer.precision import precision_of
from trainer.tensors import StagedTensors, read_tensor, save_tensors

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
METADATA = {"format": "pt"}
"""Metadata of the weights' files."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights that the ranks of a job have exported together."""

    config: Mapping[str, Any]
    """Content of config.json."""
    tensors: StagedTensors


@dataclass(frozen=True)
class GatheredAdapter:
    """Factors that the ranks of a job train, beside the weights of the checkpoint that they adapt."""

    config: Mapping[str, Any]
    """Content of config.json."""
    base: AdaptedBase
    factors: Mapping[str, Tensor]
    """float32, one for each of `factor_shapes` on rank 0, none on the others."""


Exportable = Parameters | StagedWeights | GatheredAdapter
"""What `publish_checkpoint` accepts."""


def checkpoint_tensors(parameters: Parameters) -> dict[str, Tensor]:
    """Tensors of the exported layout by name, one per expert. They share the memory of `parameters`."""
    tensors: dict[str, Tensor] = {}
    for buffer in parameters.buffers:
        for name in buffer.spans:
            if buffer.codes is None or buffer.scales is None:
                values = buffer.view(buffer.leaf, name).detach().to(buffer.dtype)
                singles = expert_names(name, tuple(values.shape))
                tensors |= dict(zip(singles, values if values.dim() == 3 else [values], strict=True))
                continue
            for single, codes, scales in _matrices(buffer, name):
                tensors[single] = codes
                tensors[f"{single}_scale_inv"] = scales
    return tensors


class StoredLeaves(Mapping[str, Tensor]):
    """What the forward pass of an exported checkpoint reads: float32 [..., rows, columns] by parameter, experts
    stacked. Each access reads one from the disk.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._files, self._shapes = TensorFiles(directory, WEIGHTS), parameter_shapes(dict(config))
        self._quantized = exported_forward(dict(config)).quantized

    def __getitem__(self, name: str) -> Tensor:
        singles = expert_names(name, self._shapes[name])
        stored = torch.stack([read_tensor(self._files, single) for single in singles])
        if self._quantized and is_quantized(name):
            scales = torch.stack([read_tensor(self._files, f"{single}_scale_inv") for single in singles])
            stored = dequantize_stack(stored, scales)
        return stored.float().reshape(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def load_checkpoint(directory: Path) -> Parameters:
    """Parameters of an exported checkpoint, with its codes and scales if it has any; masters are the stored weights."""
    config = check_checkpoint(directory)
    files = TensorFiles(directory, WEIGHTS)
    quantized = exported_forward(config).quantized
    masters, codes, scales = {}, {}, {}
    for name, shape in parameter_shapes(config).items():
        singles = expert_names(name, shape)
        if not (quantized and is_quantized(name)):
            found = [read_tensor(files, single).float() for single in singles]
            masters[name] = torch.stack(found) if len(shape) == 3 else found[0]
            continue
        codes[name] = torch.stack([read_tensor(files, single) for single in singles])
        scales[name] = torch.stack([read_tensor(files, f"{single}_scale_inv") for single in singles])
        masters[name] = torch.zeros(shape)
    parameters = Parameters.from_masters(config, masters)
    parameters.set_codes(codes, scales)
    return parameters


def publish_checkpoint(
    store: Store,
    key: str,
    parameters: Exportable,
    tokenizer: Artifact,
    *,
    parents: Mapping[str, ArtifactRef],
    config: Mapping[str, Any],
    code_version: str,
    meta: Mapping[str, Any],
    metrics: bytes,
) -> Artifact:
    """Commit a `checkpoint` artifact. See `commit_checkpoint`."""
    with ArtifactWriter(store, "checkpoint", key, parents=parents, config=config, code_version=code_version) as out:
        return commit_checkpoint(out, parameters, tokenizer, meta=meta, metrics=metrics)


def commit_checkpoint(
    out: ArtifactWriter, parameters: Exportable, tokenizer: Artifact, *, meta: Mapping[str, Any], metrics: bytes
) -> Artifact:
    """Write a checkpoint to an artifact's stage and commit it. tokenizer: artifact with the tokenizer's files. metrics:
    JSONL, outside the digest.
    """
    if isinstance(parameters, GatheredAdapter):
        meta = {**meta, **_add_adapter(out, parameters.base.adapter, parameters.factors.items())}
        _copy_weights(out, parameters.base.checkpoint)
    else:
        if isinstance(parameters, AdaptedParameters):
            meta = {**meta, **_add_adapter(out, parameters.adapter, parameters.masters())}
            parameters = parameters.base
        tensors = parameters.tensors if isinstance(parameters, StagedWeights) else checkpoint_tensors(parameters)
        save_tensors(out, WEIGHTS, tensors, METADATA)
    failpoint("checkpoint-staged")
    out.add_json("config.json", parameters.config)
    out.add_json("generation_config.json", _generation_config(parameters.config))
    for name in TOKENIZER_FILES:
        if name not in tokenizer.names():
            raise TrainingDataError(f"{tokenizer.ref.uri} has no {name}: build the tokenizer again")
        out.add_bytes(name, tokenizer.path(name).read_bytes())
    (out.directory / "metrics.jsonl").write_bytes(metrics)
    out.add_file("metrics.jsonl", telemetry=True)
    if not isinstance(parameters, StagedWeights):  # of which `put` compared every tensor with the config
        read_adapter(out.directory, check_checkpoint(out.directory))
    return out.commit(meta={**precision_facts(parameters.config), "policy_version": None, **meta})


def follow_checkpoint(parameters: Exportable) -> None:
    """Take part in rank 0's `commit_checkpoint`. Every other rank must call this. Raises RanksLost."""
    if isinstance(parameters, StagedWeights):
        parameters.tensors.put(None, WEIGHTS)


def precision_facts(config: Mapping[str, Any]) -> dict[str, str]:
    """What the manifest says of the recipe of a policy with this config.json."""
    forward = exported_forward(config)
    return {
        "forward_recipe": forward.recipe,
        "recipe": precision_of(config).kind,
        "activations": forward.activations,
        "head_dtype": forward.head_dtype,
        "router_dtype": forward.router_dtype,
    }


def _add_adapter(
    out: ArtifactWriter, adapter: Adapter, factors: Iterable[tuple[str, Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write the adapter's files; the base beside it keeps its codes and scales. Returns the manifest's words on it."""
    (out.directory / FOLDER).mkdir()
    save_tensors(out, f"{FOLDER}/{ADAPTER_WEIGHTS}", adapter_tensors(factors), METADATA)
    out.add_json(f"{FOLDER}/{ADAPTER_CONFIG}", adapter.as_json())
    return {"adapter": asdict(adapter)}


def _copy_weights(out: ArtifactWriter, checkpoint: Artifact) -> None:
    """Write the weights of another checkpoint, one tensor at a time."""
    files = TensorFiles(checkpoint.directory(), WEIGHTS)
    add_tensors(out, WEIGHTS, files.forms, lambda name: bytes_of(files.tensor(name)), METADATA)


def _matrices(buffer: Buffer, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    assert buffer.codes is not None and buffer.scales is not None
    start, end, shape = buffer.spans[name]
    for offset, single in zip(range(start, end), expert_names(name, shape), strict=True):
        yield single, buffer.codes[offset], buffer.scales[offset]


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    stop = {"eos_token_id": config["eos_token_id"]} if config.get("eos_token_id") is not None else {}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **stop}
