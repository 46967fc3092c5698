"""Read and write named tensors as a safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import SchemaError

_SYSTEM = re.compile(r"\(os error (\d+)\)")


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the file.

    Raises OSError if the system refuses; safetensors itself reports a full disk only as text.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        found = _SYSTEM.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file. Raises SchemaError if one is truncated or contains a number that is not finite."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise SchemaError(f"{path} is not a readable safetensors file ({error}): make its artifact again") from None
    for name, tensor in tensors.items():
        check_finite(name, tensor, path)
    return tensors


def check_finite(name: str, tensor: Tensor, path: Path) -> None:
    """Raise SchemaError if a number of `tensor` is not finite."""
    if not bool(torch.isfinite(tensor.float()).all()):
        raise SchemaError(
            f"{path}: tensor {name} contains numbers that are not finite: its training diverged, use an earlier policy"
        )
