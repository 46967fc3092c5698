"""Read and write named tensors as safetensors files, through `contracts.tensor_files`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from contracts.artifacts import ArtifactWriter
from contracts.digests import tensors_digest
from contracts.errors import SchemaError
from contracts.tensor_files import TensorFiles, is_finite
from contracts.tensor_parts import add_tensors, bytes_of, form_of


def save_tensors(
    out: ArtifactWriter, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as the file `name` of an artifact, or as the parts of it. Copies one tensor at a time at most."""
    forms = {tensor: form_of(value) for tensor, value in tensors.items()}
    add_tensors(out, name, forms, lambda tensor: bytes_of(tensors[tensor]), metadata)


def read_tensor(files: TensorFiles, name: str) -> Tensor:
    """One tensor. Raises SchemaError if it is missing, damaged or contains a number that is not finite."""
    tensor = files.tensor(name)
    check_finite(name, tensor, files.path(name))
    return tensor


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Content digest of named tensors, independent of the file format."""
    return tensors_digest(
        (name, *form_of(tensor), hashlib.sha256(bytes_of(tensor)).hexdigest()) for name, tensor in tensors.items()
    )


def check_finite(name: str, tensor: Tensor, path: Path) -> None:
    """Raise SchemaError if a number of `tensor` is not finite."""
    if not is_finite(tensor):
        raise SchemaError(
            f"{path}: tensor {name} contains numbers that are not finite: its training diverged, use an earlier policy"
        )
