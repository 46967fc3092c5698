"""Weights of a Hugging Face model directory: float32 masters, and the codes and scales of an FP8 original."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise

from contracts.architectures import expert_names, parameter_shapes
from contracts.checkpoints import WEIGHTS, is_quantized
from contracts.errors import SchemaError
from contracts.tensor_files import TensorFiles
from trainer.errors import TrainingDataError
from trainer.tensors import read_tensor

_NUMBER = re.compile(r"\.\d+\.")
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_AGAIN = "fetch all its files again, from one revision"


@dataclass
class OriginalWeights:
    """Weights of a directory by the trainer's names, experts stacked."""

    masters: dict[str, Tensor] = field(default_factory=dict)
    """float32."""
    codes: dict[str, Tensor] = field(default_factory=dict)
    """float8_e4m3fn [matrices, rows, columns] of an FP8 original; else empty."""
    scales: dict[str, Tensor] = field(default_factory=dict)
    """float32 [matrices, row blocks, column blocks]."""


def read_original(directory: Path, config: Mapping[str, Any], *, fp8: bool) -> OriginalWeights:
    """Weights in one file or in parts. config: of the checkpoint. fp8: whether the projections are FP8 blocks.

    Raises TrainingDataError with the file or tensor that is missing, damaged, or of another checkpoint.
    """
    try:
        files = TensorFiles(directory, WEIGHTS)
        shapes = parameter_shapes(config)
        _require_same_tensors(files, directory, shapes, fp8=fp8)
        _require_one_checkpoint(files, directory)
        found = OriginalWeights()
        for name, shape in shapes.items():
            if fp8 and is_quantized(name):
                _read_coded(found, files, name, shape)
            else:
                found.masters[name] = _read_plain(files, name, shape)
        _require_tied_head(files, directory, found)
    except SchemaError as error:
        raise TrainingDataError(str(error)) from None
    return found


def _read_plain(files: TensorFiles, name: str, shape: tuple[int, ...]) -> Tensor:
    master = torch.empty(shape)
    for target, single in zip(master if len(shape) == 3 else [master], expert_names(name, shape), strict=True):
        target.copy_(read_tensor(files, single))
    return master


def _read_coded(found: OriginalWeights, files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
    singles = expert_names(name, shape)
    codes = [read_tensor(files, single) for single in singles]
    scales = [read_tensor(files, f"{single}_scale_inv").float() for single in singles]
    plain = [dequantize_blockwise(code, scale) for code, scale in zip(codes, scales, strict=True)]
    found.masters[name] = torch.stack(plain).view(shape)
    found.codes[name], found.scales[name] = torch.stack(codes), torch.stack(scales)


def _require_same_tensors(
    files: TensorFiles, directory: Path, shapes: Mapping[str, tuple[int, ...]], *, fp8: bool
) -> None:
    """Require exactly the tensors that config.json implies."""
    expected = {single: shape[-2:] for name, shape in shapes.items() for single in expert_names(name, shape)}
    if fp8:
        for name, shape in list(expected.items()):
            if is_quantized(name):
                expected[f"{name}_scale_inv"] = tuple(-(-side // 128) for side in shape)
    for name, shape in expected.items():
        have = files.forms.get(name)
        if have is not None and have[1] != shape:
            raise TrainingDataError(
                f"{directory}: tensor {name} is {have[1]}, config.json says {shape}: fetch both again"
            )
        if have is not None and is_quantized(name) and (have[0] == "F8_E4M3") != fp8:
            said = "quantization_config says fp8" if fp8 else "config.json has no quantization_config"
            raise TrainingDataError(
                f"{directory}: tensor {name} is {have[0]}, but {said}: pass an original whose projections are all of"
                f" one kind, or {_AGAIN}"
            )
    tied = {"lm_head.weight"} if "lm_head.weight" not in shapes else set()
    for name in sorted(set(files.forms) - set(expected) - tied):
        if not _IGNORED.search(name):
            raise TrainingDataError(
                f"{directory}: tensor {name} is in the files, but config.json describes a model without it: {_AGAIN}"
            )


def _require_one_checkpoint(files: TensorFiles, directory: Path) -> None:
    """Require signs that all parts belong together: equal dtypes over the layers, and one revision where the download
    noted it.
    """
    seen: dict[str, tuple[str, str]] = {}
    for name, (dtype, _) in files.forms.items():
        role = _NUMBER.sub(".*.", name)
        first, known = seen.setdefault(role, (name, dtype))
        if known != dtype:
            raise TrainingDataError(
                f"{directory}: tensor {first} in {files.path(first).name} is {known}, but {name} in"
                f" {files.path(name).name} is {dtype}: they are parts of two checkpoints; {_AGAIN}"
            )
    revisions: dict[str, str] = {}
    for part in sorted({files.path(name).name for name in files.forms} | {"config.json"}):
        note = directory / ".cache" / "huggingface" / "download" / f"{part}.metadata"
        if note.is_file():
            revisions[part] = (note.read_text().splitlines() or [""])[0]
    for part, revision in revisions.items():
        first, known = next(iter(revisions.items()))
        if revision != known:
            raise TrainingDataError(
                f"{directory}: {first} is of revision {known[:12]}, but {part} of {revision[:12]}: {_AGAIN}"
            )


def _require_tied_head(files: TensorFiles, directory: Path, found: OriginalWeights) -> None:
    """A tied checkpoint may hold its head once more; it must be the embedding."""
    if "lm_head.weight" in found.masters or "lm_head.weight" not in files.forms:
        return
    head = read_tensor(files, "lm_head.weight").float()
    if not torch.equal(head, found.masters["model.embed_tokens.weight"]):
        raise TrainingDataError(
            f"{directory}: tie_word_embeddings is true, but lm_head.weight differs from the embedding: set it to false,"
            f" or {_AGAIN}"
        )
