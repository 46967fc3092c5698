"""Read and write named tensors as safetensors files, through `contracts.tensor_files`."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from contracts.artifacts import ArtifactWriter
from contracts.digests import tensors_digest
from contracts.errors import SchemaError
from contracts.rank_parts import RankParts, put_parts
from contracts.store import Store
from contracts.tensor_files import Form, TensorFiles, is_finite
from contracts.tensor_parts import add_tensors, bytes_of, form_of
from trainer.ranks import Ranks


@dataclass(frozen=True)
class StagedTensors:
    """Tensors that the ranks of a job have written, each its own on its machine's disk: see `contracts.rank_parts`."""

    store: Store
    ranks: Ranks
    folder: tempfile.TemporaryDirectory[str]
    """Of this rank."""
    own: RankParts
    forms: Mapping[str, Form]
    """Of all ranks' tensors."""

    def put(self, out: ArtifactWriter | None, name: str) -> None:
        """Put the tensors of all ranks into the artifact of rank 0, as its file `name`. Every rank calls this, once.

        out: the artifact's writer on rank 0, None on the others. It may be called in a thread beside the one that
        trains. Raises RanksLost.
        """
        with self.folder:
            put_parts(out, self.store, name, self.own, self.forms, self.ranks.aside.exchange)


def save_tensors(
    out: ArtifactWriter,
    name: str,
    tensors: Mapping[str, Tensor] | StagedTensors,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as the file `name` of an artifact, or as the parts of it. Copies one tensor at a time at most.

    Staged tensors are moved, while every other rank calls `put`; their metadata is that of their staging.
    """
    if isinstance(tensors, StagedTensors):
        tensors.put(out, name)
        return
    forms = {tensor: form_of(value) for tensor, value in tensors.items()}
    add_tensors(out, name, forms, lambda tensor: bytes_of(tensors[tensor]), metadata)


def read_tensor(files: TensorFiles, name: str) -> Tensor:
    """One tensor. Raises SchemaError if it is missing, damaged or contains a number that is not finite."""
    tensor = files.tensor(name)
    check_finite(name, tensor, files.path(name))
    return tensor


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file by the rest of their names after `prefix`. Each access reads one from the disk."""

    def __init__(self, files: TensorFiles, prefix: str, names: Iterable[str]) -> None:
        self._files, self._prefix, self._names = files, prefix, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return read_tensor(self._files, f"{self._prefix}{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
